"""There and back: every network of networks.py and odd_networks.py to ONNX, initialized, home, and measured there.

`python tests/home/round_trip.py [NAME ...]` prints the table of docs/pytorch.md. Each network takes five ways: the one
call, and through a file with either exporter, home by value (`--like`) or by name. What is measured at home is measured
here, by plain forward hooks and by the network's output beside the written file's, not by the code under test.

Small networks come first. With `--results FILE` each network's row is saved as soon as it is known, and rows that the
file has are not run again. `LSUV_ROUND_TRIP=FILE pytest -m torch` saves what the tests see in the same form.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import io
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import torch
from networks import Batch
from odd_networks import NETWORKS
from safetensors.torch import load_file
from torch import nn

import lsuv_cli
from lsuv_cli.errors import LsuvError
from lsuv_cli.report import Report
from lsuv_cli.torch import lsuv_

EXPORTERS = ("legacy", "dynamo")
TOLERANCE = 0.01
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
WITHOUT_TRAINING_MODE = (nn.modules.batchnorm._BatchNorm, nn.Dropout, nn.MultiheadAttention, nn.RNNBase)


@dataclass
class Outcome:
    """How one way went: a few words for the table, and whatever was called right and is not."""

    words: str
    reason: str = ""  # why not all of it came home
    wrong: list[str] = field(default_factory=list)
    compared: int = 0  # layers measured by hooks beside the report
    uncompared: int = 0  # those that the report has not, or not as often as they were called
    seconds: float = 0.0


def called(net: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The network's output as a list of tensors."""
    with torch.no_grad():
        return list(_flat(net(*batch) if isinstance(batch, tuple) else net(**batch)))


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "values"):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)


def projections(part: nn.MultiheadAttention, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What the products of nn.MultiheadAttention with q, k and v give, from what the module was given.

    No hook sees them. Equal inputs are multiplied with one packed matrix.
    """
    width = part.embed_dim
    if part._qkv_same_embed_dim:
        weights = list(part.in_proj_weight.detach().double().split(width))
    else:
        weights = [w.detach().double() for w in (part.q_proj_weight, part.k_proj_weight, part.v_proj_weight)]
    biases = part.in_proj_bias
    added = biases.detach().double().split(width) if biases is not None else (0.0, 0.0, 0.0)
    q, k, v = (x.double() @ w.T + b for x, w, b in zip(given, weights, added, strict=True))
    if not part._qkv_same_embed_dim or given[1] is not given[2]:
        return [q, k, v]
    return [torch.cat([q, k, v], -1)] if given[0] is given[1] else [q, torch.cat([k, v], -1)]


def variances(net: nn.Module, batch: Batch) -> dict[str, list[float]]:
    """The variance of what each linear layer and convolution gives, call by call, by plain forward hooks.

    Those of nn.MultiheadAttention are its products with q, k and v, and its output.
    """
    found: dict[str, list[float]] = {}
    handles = []
    for name, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention):

            def attend(part: nn.Module, given: Any, named: Any, output: Any, name: str = name) -> None:
                names = ("query", "key", "value")
                inputs = tuple(given[k] if k < len(given) else named[key] for k, key in enumerate(names))
                for value in (*projections(part, inputs), output[0]):
                    found.setdefault(name, []).append(value.double().var(correction=0).item())

            handles.append(module.register_forward_hook(attend, with_kwargs=True))
        elif isinstance(module, LAYERS):

            def see(_m: nn.Module, _i: Any, output: torch.Tensor, name: str = name) -> None:
                found.setdefault(name, []).append(output.double().var(correction=0).item())

            handles.append(module.register_forward_hook(see))
    # In eval mode nn.TransformerEncoderLayer calls one fused operator, past its own modules.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        called(net, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for handle in handles:
            handle.remove()
    return found


def off(report: Report, net: nn.Module, batch: Batch) -> tuple[list[str], int, int]:
    """The layers that the report calls ok and that are not, by hooks; how many were compared, and how many not."""
    found = variances(net, batch)
    wrong: list[str] = []
    compared = uncompared = 0
    for module, values in found.items():
        entries = [layer for layer in report.layers if layer.module == module and layer.op in
                   {"Conv", "ConvTranspose", "Gemm", "MatMul"}]  # fmt: skip
        if len(entries) != len(values):
            uncompared += 1
            continue
        compared += 1
        for entry, value in zip(entries, values, strict=True):
            if entry.status == "ok" and not abs(value - 1) <= TOLERANCE:
                wrong.append(f"{module} has variance {value:.4g} at home")
    return wrong, compared, uncompared


def export(net: nn.Module, batch: Batch, path: Path, exporter: str, folded: bool = False) -> Path:
    """An ONNX file; `folded` as PyTorch does by default."""
    args, kwargs = (batch, None) if isinstance(batch, tuple) else ((), batch)
    options: dict[str, Any] = {"kwargs": kwargs, "dynamo": exporter == "dynamo"}
    if exporter == "dynamo":
        options |= {"optimize": folded, "external_data": False, "verbose": False}
    elif not folded:
        options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    silent = mock.patch.object(torch._C, "_jit_onnx_log", lambda *_: None, create=True)  # noqa: PT008  a plain function, as the original
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), silent:
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.onnx.export(net, args, str(path), **options)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
            logging.disable(disabled)
    return path


def feeds(path: Path, net: nn.Module, batch: Batch) -> dict[str, np.ndarray]:
    """What the file's inputs are fed: the batch, and defaults of `forward` that the legacy exporter makes inputs of."""
    held = onnx.load(path).graph
    names = [value.name for value in held.input if value.name not in {t.name for t in held.initializer}]
    if isinstance(batch, dict) and set(names) <= set(batch):
        return {name: batch[name].numpy() for name in names}
    given = [tensor.numpy() for tensor in (batch.values() if isinstance(batch, dict) else batch)]
    known = inspect.signature(net.forward).parameters
    return dict(zip(names, [*given, *(np.asarray(known[name].default) for name in names[len(given) :])], strict=True))


def by_call(name: str, **settings: Any) -> Outcome:
    """Home by lsuv_."""
    net, batch = NETWORKS[name]()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    try:
        report = lsuv_(net, batch, **settings)
    except LsuvError as problem:
        same = all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        return Outcome("refused", str(problem), [] if same else ["changed although it failed"])
    outcome = judged(report, net, batch)
    untold = [x.module for x in report.layers if x.status == "ok" and x.variance_home is None and
              "not measured in PyTorch" not in x.notes]  # fmt: skip
    outcome.wrong += [f"{module} is ok without a measurement" for module in untold]
    return outcome


def judged(report: Report, net: nn.Module, batch: Batch) -> Outcome:
    ok = sum(layer.status in {"ok", "tied"} for layer in report.layers)
    rest = [layer for layer in report.layers if layer.status not in {"ok", "tied"}]
    wrong, compared, uncompared = off(report, net, batch)  # whatever the exit code: ok means ok
    if not report.exit_code and not any(isinstance(part, WITHOUT_TRAINING_MODE) for part in net.modules()):
        wrong += [f"in train mode {text}" for text in off(report, net.train(), batch)[0]]
        net.eval()
    words = f"{ok}" if not rest else f"{ok} of {len(report.layers)}"
    assert report.carried is not None
    if report.carried.left:
        return Outcome(f"told: {len(report.carried.left)} not carried", report.carried.left[0].reason, wrong)
    if report.exit_code:
        bad = next(x for x in rest if x.status not in {"skipped", "excluded"})
        return Outcome(f"told: {words}", f"{bad.module or bad.name} {bad.status}: {'; '.join(bad.notes)}", wrong)
    return Outcome(words, rest[0].notes[0] if rest and rest[0].notes else "", wrong, compared, uncompared)


def by_file(name: str, path: Path, way: str, folded: bool = False) -> Outcome:
    """Home through an exported file, by value or by name."""
    net, batch = NETWORKS[name]()
    given = feeds(path, net, batch)
    written, weights = path.with_name("out.onnx"), path.with_name("after.safetensors")
    like = {key: value.numpy() for key, value in net.state_dict().items()} if way == "like" else None
    try:
        report = lsuv_cli.initialize(
            path, given, output=written, weights=weights, like=like, force=True, batch_size="all"
        ).report
    except LsuvError as problem:
        return Outcome("refused", str(problem))
    state = OrderedDict(load_file(weights))
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]  # torchvision's MNASNet asks for it
    loaded = net.load_state_dict(state, strict=way == "like")
    outcome = judged(report, net, batch)
    if folded and way == "like":  # variance 1 then holds behind the BatchNorm, and the output below tells
        outcome.wrong.clear()
    outcome.wrong += [f"{key} is no name of the network" for key in loaded.unexpected_keys]
    if not report.exit_code and not (gap := difference(net, batch, written, given)) <= 1e-3:
        outcome.wrong.append(f"the output differs from the file's by {gap:.1e}")
    return outcome


def difference(net: nn.Module, batch: Batch, path: Path, given: dict[str, np.ndarray]) -> float:
    """The largest difference between a network's outputs and a file's, as a ratio of the largest number."""
    there = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)
    here = [tensor.numpy() for tensor in called(net, batch)]
    pairs = list(zip(here, there, strict=False))
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-9)) for one, other in pairs)


def ways(
    name: str, exporter: str, directory: Path, folded: bool = False, wanted: tuple[str, ...] = ("like", "names")
) -> Iterator[tuple[str, Outcome]]:
    """Both ways home from one exporter's file, or one of them."""
    net, batch = NETWORKS[name]()
    problem = ""
    try:
        path = export(net, batch, directory / "model.onnx", exporter, folded)
    except Exception as failed:
        problem = type(failed).__name__
    if not problem:
        try:
            if not difference(net, batch, path, feeds(path, net, batch)) <= 1e-3:
                problem = "the exported file computes something else"
        except Exception:  # of onnxruntime, which gives its own kinds
            problem = "onnxruntime cannot run the exported file"
    for way in wanted:
        yield way, Outcome("not exported", problem) if problem else by_file(name, path, way, folded)


def row(name: str) -> dict[str, Outcome]:
    """All ways of one network."""
    begun = time.perf_counter()

    def timed(outcome: Outcome) -> Outcome:
        nonlocal begun
        outcome.seconds, begun = round(time.perf_counter() - begun, 1), time.perf_counter()
        return outcome

    try:
        found = {"one call": timed(by_call(name))}
        with tempfile.TemporaryDirectory() as directory:
            for exporter in EXPORTERS:
                for way, outcome in ways(name, exporter, Path(directory)):
                    found[f"{exporter} {way}"] = timed(outcome)
    except Exception as problem:
        return {"any": Outcome("failed", repr(problem), [repr(problem)])}
    return found


WAYS = ("one call", *(f"{exporter} {way}" for exporter in EXPORTERS for way in ("like", "names")))


def save(path: Path, name: str, found: dict[str, Outcome]) -> None:
    """Append what is known of a network's row to a file."""
    with path.open("a") as file:
        file.write(json.dumps({"network": name, "ways": {way: asdict(x) for way, x in found.items()}}) + "\n")


def saved(path: Path | None) -> dict[str, dict[str, Outcome]]:
    """The whole rows that an earlier run has left."""
    rows: dict[str, dict[str, Outcome]] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        entry = json.loads(line)
        rows.setdefault(entry["network"], {}).update({way: Outcome(**x) for way, x in entry["ways"].items()})
    return {name: {way: row[way] for way in WAYS} for name, row in rows.items() if row.keys() >= set(WAYS)}


def size(name: str) -> int:
    return sum(tensor.numel() for tensor in NETWORKS[name]()[0].state_dict().values())


def run(names: list[str], results: Path | None) -> dict[str, dict[str, Outcome]]:
    """The rows of all networks, the small ones first."""
    rows = saved(results)
    for name in sorted((name for name in names if name not in rows), key=size):
        rows[name] = row(name)
        if results is not None:
            save(results, name, rows[name])
        seconds = sum(outcome.seconds for outcome in rows[name].values())
        print(f"{name}: {' | '.join(x.words for x in rows[name].values())} ({seconds:.0f} s)", file=sys.stderr)
        for way, outcome in rows[name].items():
            for text in outcome.wrong:
                print(f"{name}, {way}: WRONG: {text}", file=sys.stderr, flush=True)
    return {name: rows[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks of networks.py; all, if none is given")
    parser.add_argument("--results", type=Path, metavar="FILE", help="rows that are known, one in a line of JSON")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in NETWORKS]:
        parser.error(f"no network is called {unknown[0]!r}; there are: {', '.join(NETWORKS)}")
    rows = run(chosen.names or list(NETWORKS), chosen.results)
    packages = ("torch", "torchvision", "timm", "transformers", "onnxscript", "onnxruntime")
    print(", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages), "\n")
    print("| network | one call | legacy, `--like` | legacy, names | dynamo, `--like` | dynamo, names |")
    print("|---|---|---|---|---|---|")
    reasons: dict[str, list[str]] = {}
    for name, found in rows.items():
        print(f"| {name} | {' | '.join(outcome.words for outcome in found.values())} |")
        for way, outcome in found.items():
            if outcome.reason:
                reasons.setdefault(outcome.reason, []).append(f"{name}, {way}")
    for reason, where in reasons.items():
        print(f"- {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {reason}")
    outcomes = [outcome for found in rows.values() for outcome in found.values()]
    wrong = sum(len(outcome.wrong) for outcome in outcomes)
    compared, rest = (sum(getattr(outcome, kind) for outcome in outcomes) for kind in ("compared", "uncompared"))
    print(f"\n{wrong} called right that are not; by hooks {compared} layers compared, {rest} not found in the report")


if __name__ == "__main__":
    main()
