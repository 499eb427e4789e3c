# mypy: disable-error-code="call-overload"
"""The verdict on one random model (differential.py): what lsuv reports against what the written file does.

The file is run batch by batch, as it is, by unoptimized onnxruntime (flat_models.py); variances are taken in float64.

- `wrong`: a layer is called ok, and its variance is not within the tolerance of the target
- `misreported`: the reported variance is not the true one
- `noise`: a layer is called ok, but what it puts out is rounding errors
- `tied`: the same for a shared weight, its uses taken together
- `scaled`: a layer is called dead, and its weight was scaled all the same
- `not dead`, `finite`, `reachable`: the reason for which a layer was given up does not hold
- `outside`: a layer that is linear in a weight of its own, in float32, was not brought to the target
- `left alone`, `missing`: a layer was skipped for no good reason, or is not in the report at all
- `refused`, `internal error`: no result for a model that onnxruntime runs
- `unloadable`, `other outputs`, `changed`, `left behind`: the written file, or what is beside it, is wrong
- `nothing done`: success, and no layer was initialized
- `engines differ`: onnx's reference evaluator, asked in a part of the cases, gives another variance than onnxruntime
"""

from __future__ import annotations

import collections
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

import calls
import changes
import flat_models
from disguises import Case
from flat_models import Layer
from lsuv_cli.errors import LsuvError

# Beside lsuv's own tolerance: rounding, which differs between optimized and unoptimized kernels, and where a value near
# a threshold falls on its other side. Few samples make the latter large.
ALLOWANCE = {TensorProto.FLOAT: 3e-3, TensorProto.DOUBLE: 3e-3, TensorProto.FLOAT16: 3e-2, TensorProto.BFLOAT16: 3e-2}
EXACT = {TensorProto.FLOAT, TensorProto.DOUBLE}
BY_COMMAND, BY_REFERENCE = 40, 8  # one case in so many is run by the command, or by the reference evaluator too
NOTHING = 1e-20  # a variance that is as good as none
REPEATS, MANY_REPEATS = 12, 300  # of models that draw numbers; of those that look wrong by the first few
GOOD_REASONS = (
    "no input of the model reaches it",
    "its constant is no weight",
    "computed from the input",
    "tied='skip'",
    "--tied skip",
    "drawn at random",
    "layers and dropped at random",
    "elsewhere too and dropped at random",
    "an If chooses",
    "the layer is inside a function of the model",
    "a constant inside a function of the model",
    "computed inside a function of the model",
    "adds another value inside",
    "its weight is a single number",
    "recurrent",
)


# With other weights there are no rows; onnxruntime does not reshape nothing to (0, -1), nor broadcast it, nor pool it.
NO_ROWS = re.compile("cannot be reshaped|Can broadcast 0 by 0 or 1|Only N can be zero|cannot broadcast on dim 0")


@dataclass(frozen=True)
class Finding:
    """Something that is not as lsuv says, or not as it should be."""

    seed: int
    number: int
    kind: str
    layer: str = ""
    told: str = ""
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        repeat = f"python tests/differential.py --seed {self.seed} --only {self.number}"
        return f"{self.number} {self.kind}: {self.layer} {self.told} [{', '.join(self.features)}] ({repeat})"


@dataclass(frozen=True)
class Seen:
    """A layer's output in the written file, and what was asked of it."""

    flat: onnx.ModelProto
    layer: Layer
    name: str
    true: float
    spread: float  # four standard deviations of it, where the model draws numbers
    allowance: float
    target: float
    tol: float

    @property
    def off(self) -> float:
        return abs(self.true / self.target - 1)

    def __str__(self) -> str:
        what = f"{self.layer.node.op_type}, {self.layer.weight}"
        return f"true {self.true:.6g} target {self.target} tol {self.tol} ({what})"


@dataclass
class Judge:
    """One case, from its model to its findings."""

    case: Case
    seed: int
    number: int
    counts: collections.Counter[str]
    phase: Callable[[str], None]

    def __post_init__(self) -> None:
        self.findings: list[Finding] = []

    def find(self, kind: str, layer: str = "", told: str = "") -> None:
        line = " ".join(told.split())[:400]
        self.findings.append(Finding(self.seed, self.number, kind, layer, line, tuple(sorted(self.case.features))))

    def run(self) -> list[Finding]:
        given, batches = self.case.model, self.case.batches
        self.phase("before")
        try:
            before = flat_models.run(given, batches)
        except Exception:
            self.counts["cases onnxruntime does not run"] += 1
            return []
        if not all(np.isfinite(a).all() for values in before for a in values if a.dtype.kind == "f"):
            self.counts["cases with values that are not finite"] += 1
            return []
        self.counts["cases"] += 1
        with tempfile.TemporaryDirectory() as folder:
            self.phase("lsuv")
            done = self.initialized(Path(folder))
            self.phase("after")
            if done is not None:
                self.judge(onnx.load(Path(folder) / "o.onnx"), done)
        return self.findings

    def initialized(self, folder: Path) -> Any:
        """lsuv's result and report; None where there is none, or nothing more to say about it."""
        onnx.save(self.case.model, folder / "m.onnx")
        content = (folder / "m.onnx").read_bytes()
        report = None
        try:
            by_command = self.number % BY_COMMAND == 0 and isinstance(self.case.data(), dict)
            self.counts["cases by the command"] += by_command
            report = (calls.by_command if by_command else calls.by_call)(self.case, folder)
        except LsuvError as why:
            no_rows = "rows that may be none" in self.case.features and NO_ROWS.search(str(why))
            good = no_rows or any(reason in str(why) for reason in GOOD_REASONS) or not self.runs_by_default()
            if not good and self.has_layers():
                self.find("refused", "", str(why))
            else:
                self.counts["cases refused for a good reason"] += 1
        except Exception as problem:
            self.find("internal error", "", f"{type(problem).__name__}: {problem}")
        if (folder / "m.onnx").read_bytes() != content:
            self.find("changed", "m.onnx", "the input file")
        left = sorted({path.name for path in folder.iterdir()} - {"m.onnx", *(["o.onnx"] if report else [])})
        if left:
            self.find("left behind", "", ", ".join(left))
        return report

    def is_half(self) -> bool:
        """Whether values are rounded to float16 on their way."""
        return bool(self.case.features & {"float16", "cast to float16"})

    def runs_by_default(self) -> bool:
        """Whether onnxruntime runs the model as given with its own settings, which use buffers again.

        onnx infers as many rows for x[0:-1] of opset 10 as x has; onnxruntime may then give both one buffer, and fails.
        """
        try:
            flat_models.run(self.case.model, self.case.batches, reuse=True)
        except Exception:
            return False
        return True

    def has_layers(self) -> bool:
        """Whether there is a layer that lsuv should initialize, as far as can be told from outside."""
        return bool(flat_models.layers(flat_models.flatten(self.case.model, self.case.batches)))

    def judge(self, written: onnx.ModelProto, report: Any) -> None:
        batches = self.case.batches
        chosen = self.case.settings.keys() & {"include", "exclude"}
        if not chosen and report.exit_code == 0 and all(e.status == "skipped" for e in report.layers):
            self.find("nothing done", "", "; ".join(f"{e.name}: {' '.join(e.notes)}" for e in report.layers[:3]))
        try:
            whole = flat_models.run(written, batches)
        except Exception as problem:
            self.find("unloadable", "", str(problem))
            return
        flat = flat_models.flatten(written, batches)
        random = flat_models.is_random(flat)
        again = flat_models.run(flat, batches, [o.name for o in written.graph.output])
        if not random and not _equal(whole, again, 3e-2 if self.is_half() else 1e-5):
            if not self.is_half() or not _equal(whole, again, 3e-2, few=1e-2):
                self.find("other outputs", "", "the flat model of the tester computes something else")
                return
            self.counts["cases whose float16 outputs differ in a few elements, once flat"] += 1
        for what, how in changes.changes(self.case, written, report):
            self.find("changed", what, how)
        found = flat_models.layers(flat)
        matched = dict(self.matches(report.layers, found))
        names = list(dict.fromkeys(name for layer in found for name in layer.measured))
        truth = flat_models.measure(flat, batches, names, REPEATS if random else 1)
        uses: dict[str, list[tuple[Any, str]]] = collections.defaultdict(list)
        for k, layer in enumerate(found):
            if k in matched:
                uses[layer.weight].append((matched[k], self.entry(matched[k], layer, flat, truth)))
            else:
                self.find("missing", layer.node.output[0], f"{layer.node.op_type} with weight {layer.weight}")

        for weight, shared in uses.items():
            if not random and any(str(entry.status) == "tied" for entry, _ in shared):
                self.tied(flat, weight, shared)
        if self.number % BY_REFERENCE == 0 and not random and not self.is_half() and _is_sound(flat):
            self.compare(flat, truth)

    def tied(self, flat: onnx.ModelProto, weight: str, uses: list[tuple[Any, str]]) -> None:
        """A shared weight is right if all its uses together have the target, or its live ones, or the deciding ones."""
        if self.case.settings.get("scale") == "channel" or self.case.settings.get("residual") == "bounded":
            return
        target, tol = self.case.settings.get("target_variance", 1.0), self.case.settings.get("tol", 0.01)
        scaled = [name for entry, name in uses if entry.variance_at_turn is not None]
        found = [
            flat_models.pooled(flat, self.case.batches, names)
            for names in ([n for _, n in uses], scaled, [n for e, n in uses if e.variance])
            if names
        ]
        allowed = tol + ALLOWANCE[TensorProto.FLOAT16 if self.is_half() else TensorProto.FLOAT]
        if not any(abs(variance / target - 1) <= allowed for variance in found):
            self.find(
                "tied", weight, f"true {found} target {target} tol {tol}, all uses, those it was scaled for, live ones"
            )

    def compare(self, flat: onnx.ModelProto, truth: dict[str, list[float]]) -> None:
        """onnxruntime's variances against those of onnx's reference evaluator in float64."""
        names = list(truth)
        try:
            runs = flat_models.by_reference(flat, self.case.batches, names)
        except Exception:
            self.counts["cases the reference evaluator does not run"] += 1
            return
        self.counts["cases by the reference evaluator"] += 1
        for k, name in enumerate(names):
            exact = flat_models.variance([values[k] for values in runs])
            differ = max(exact, truth[name][0]) > 1e-9 and _off(truth[name][0], exact) > 2e-2
            if differ and flat_models.noise(flat, self.case.batches, name, exact=False) < 1e-3:
                self.find("engines differ", name, f"onnxruntime {truth[name][0]:.6g}, reference {exact:.6g}")

    def matches(self, entries: Any, found: list[Layer]) -> Iterator[tuple[int, Any]]:
        """The report's entry of each layer: by name, or else by the weight and the order of its uses."""
        free = set(range(len(found)))
        waiting = list(entries)
        for is_called in (_is_named, _is_named_inside):
            for entry in list(waiting):
                alike = [k for k in sorted(free) if found[k].node.op_type == entry.op]
                named = [k for k in alike if is_called(found[k].node, entry.name)]
                if len(named) == 1:
                    free.remove(named[0])
                    waiting.remove(entry)
                    yield named[0], entry
        for entry in waiting:
            suited = [k for k in sorted(free) if found[k].node.op_type == entry.op]
            same = [k for k in suited if found[k].weight == entry.weight] or (suited if not entry.weight else [])
            if same:
                free.remove(same[0])
                yield same[0], entry

    def entry(self, entry: Any, layer: Layer, flat: onnx.ModelProto, truth: dict[str, list[float]]) -> str:
        """Judge one line of the report; gives the value that it seems to mean."""
        chosen = self.case.settings
        reported = math.nan if entry.variance is None else entry.variance
        # Of two values that may be meant, the one that the report seems to mean.
        name = min(layer.measured, key=lambda n: _off(float(np.mean(truth[n])), reported))
        true, spread = float(np.mean(truth[name])), 4 * float(np.std(truth[name]))
        allowance = ALLOWANCE[TensorProto.FLOAT16] if self.is_half() else ALLOWANCE.get(layer.float_type, 3e-3)
        bounded = chosen.get("residual") == "bounded" and entry.target is not None
        target = entry.target if bounded else chosen.get("target_variance", 1.0)
        seen = Seen(flat, layer, name, true, spread, allowance, target, chosen.get("tol", 0.01))
        status = str(entry.status)
        if isinstance(entry.channels, dict):  # from the command's JSON
            entry.channels = SimpleNamespace(**entry.channels)
        if status in {"ok", "dead"} and entry.channels is not None:
            if not spread:
                self.channels(entry, seen)
            if status == "dead" or entry.channels.least_scale is not None:
                self.counts[f"layers {status} by channel"] += 1
                return name
        self.counts[f"layers {status}"] += 1
        if status == "dead" and not entry.shared and entry.scale and abs(entry.scale - 1) > 1e-3:
            self.find("scaled", entry.name, f"dead, and its weight was multiplied by {entry.scale}")
        kind = self.kind(entry, status, seen)
        if kind:
            told = " ".join(entry.notes) if kind == "left alone" else f"reported {entry.variance} {seen}"
            self.find(kind, entry.name, told)
        if status in {"ok", "skipped", "excluded"} or entry.variance is None or not math.isfinite(true):
            return name
        close = _off(true, reported) <= seen.allowance + spread / max(abs(true), 1e-30)
        close = close or max(true, reported) <= NOTHING
        close = close or self.is_flat(seen) or self.can_be(seen, reported) or self.rounds_to(seen, reported)
        if not close and self.doubted(seen, "misreported") != "noise":
            self.find("misreported", entry.name, f"{status} reported {entry.variance} {seen}")
        return name

    def channels(self, entry: Any, seen: Seen) -> None:
        """Every live channel has the target if it was scaled, and mean 0 if it was centred."""
        means, variances = flat_models.by_channel(seen.flat, self.case.batches, seen.layer, seen.name)
        allowed = seen.tol + seen.allowance
        self.counts["layers whose channels were judged"] += 1
        if str(entry.status) == "dead":
            alive = variances > 1e-6 * (means**2 + variances).max(initial=0.0)
            if alive.any() and self.doubted(seen, "not dead") == "not dead" and "rounding" not in " ".join(entry.notes):
                self.find("not dead", entry.name, f"channels {variances}")
            return
        if entry.channels.least_scale is not None:
            live = np.sort(variances)[entry.channels.dead :]
            if not np.abs(live / seen.target - 1).max(initial=0.0) <= allowed:
                self.find("wrong channel", entry.name, f"{live} target {seen.target}")
        if "bias centred" in entry.notes:
            # A constant channel is centred up to the rounding of its constant.
            meant = [flat_models.by_channel(seen.flat, self.case.batches, seen.layer, n) for n in seen.layer.measured]
            off = min(np.abs(m[v > 1e-6 * seen.target]).max(initial=0.0) for m, v in meant)
            if not off <= allowed * math.sqrt(seen.target):
                self.find("not centred", entry.name, f"mean {off} target {seen.target}")

    def kind(self, entry: Any, status: str, seen: Seen) -> str:
        """What is wrong with the status of a layer; nothing, mostly."""
        if status == "ok" and not seen.off <= seen.tol + seen.allowance + seen.spread / seen.target:
            return "" if self.can_be(seen, seen.target) else self.doubted(seen, "wrong")
        if status == "dead" and not seen.true <= (NOTHING if "cancelled" in self.case.features else 1e-30):
            bare = flat_models.without(seen.flat, seen.layer.weight)
            try:
                without = flat_models.measure(bare, self.case.batches, [seen.name])[seen.name][0]
            except Exception:  # without the weight there are no rows, and onnxruntime multiplies none of them
                without = 0.0
            alive = _off(seen.true, without) > 1e-6 + seen.spread / seen.true and not self.is_flat(seen)
            return "not dead" if alive and self.doubted(seen, "not dead", seen.layer.weight) == "not dead" else ""
        if status == "non-finite" and math.isfinite(seen.true):
            beyond = self.is_half() and flat_models.leaves_range(seen.flat, self.case.batches, seen.name)
            return "" if beyond or self.doubted(seen, "finite") == "noise" else "finite"
        if (
            status == "unreachable"
            and self.case.settings.get("bias", "zero") == "zero"
            and "bias kept" not in entry.notes
        ):
            return "reachable"
        if status == "outside" and not entry.shared and seen.spread == 0 and entry.channels is None:
            fused = any(a.name == "activation" for a in seen.layer.node.attribute)
            rounded = seen.off <= seen.allowance and seen.layer.float_type not in EXACT
            rounded = rounded or (
                self.is_half() and self.without_rounding(seen) <= seen.tol + ALLOWANCE[TensorProto.FLOAT]
            )
            return "outside" if not fused and not rounded and self.doubted(seen, "outside") == "outside" else ""
        if status == "skipped":
            reason = " ".join(entry.notes)
            self.counts[f"skipped: {_general(reason)}"] += 1
            good = any(part in reason for part in GOOD_REASONS) or self.read_elsewhere(reason)
            return "" if good else "left alone"
        return ""

    def can_be(self, seen: Seen, variance: float) -> bool:
        """Whether a variance is among those of many runs, where the model draws numbers that differ between runs."""
        if seen.spread == 0:
            return False
        drawn = flat_models.measure(seen.flat, self.case.batches, [seen.name], MANY_REPEATS)[seen.name]
        slack = 1 + seen.tol + seen.allowance
        return min(drawn) / slack <= variance <= max(drawn) * slack

    def rounds_to(self, seen: Seen, variance: float) -> bool:
        """Whether a variance is what rounding every value to float16 gives; onnxruntime's CPU does not round each."""
        if not self.is_half():
            return False
        try:
            runs = flat_models.by_reference(seen.flat, self.case.batches, [seen.name], doubled=False)
        except Exception:
            return False
        return _off(flat_models.variance([values[0] for values in runs]), variance) <= seen.allowance

    def without_rounding(self, seen: Seen) -> float:
        """How far from its target a layer is in double, where nothing is rounded to float16."""
        try:
            runs = flat_models.by_reference(seen.flat, self.case.batches, [seen.name])
        except Exception:
            return math.inf
        return abs(flat_models.variance([values[0] for values in runs]) / seen.target - 1)

    def is_flat(self, seen: Seen) -> bool:
        return flat_models.is_flat(seen.flat, self.case.batches, seen.name)

    def doubted(self, seen: Seen, kind: str, weight: str = "") -> str:
        """The kind of a finding, or `noise` where rounding errors make up a value, or a weight's part in it."""
        try:
            allowed = 0.1 if self.is_half() else 1e-2
            found = flat_models.noise(seen.flat, self.case.batches, seen.name, weight=weight)
            return "noise" if found > allowed else kind
        except Exception:
            # A small error leaves no rows, which onnxruntime does not run: whether there are any was noise.
            return "noise" if kind == "not dead" and "rows that may be none" in self.case.features else kind

    def read_elsewhere(self, reason: str) -> bool:
        """Whether a weight is really read by something that needs its values."""
        return "is read by" in reason and " read by Shape" not in reason and " read by Size" not in reason


def _is_named(node: onnx.NodeProto, name: str) -> bool:
    return name in (node.name, node.output[0])


def _is_named_inside(node: onnx.NodeProto, name: str) -> bool:
    """Whether a report's name is a node's behind the name of an If or a call, for which flat_models has `3f:`."""
    own = [node.name, node.output[0], re.sub(r"^(\d+[bf]:)+", "", node.output[0])]
    return any(known and name.endswith(f"/{known}") for known in own)


def _is_sound(flat: onnx.ModelProto) -> bool:
    """Whether the reference evaluator computes what ONNX says.

    Its LRN takes the number of samples for that of channels. It takes every BatchNormalization before opset 15 for one
    in training mode, and Softmax and its like before opset 13, which were over all axes behind one, for later ones.
    Running statistics go on from batch to batch in onnxruntime, and not in the evaluator. A ConvTranspose with output
    padding has other values there than in PyTorch, and one with groups adds the first group's bias to all of them.
    """
    if any(_has_groups(node) and len(node.input) > 2 for node in flat.graph.node if node.op_type == "ConvTranspose"):
        return False
    if any(held.name == "output_padding" for node in flat.graph.node for held in node.attribute):
        return False
    if any(held.name == "training_mode" and held.i for node in flat.graph.node for held in node.attribute):
        return False
    version = next(o.version for o in flat.opset_import if not o.domain)
    wrong = {"LRN", *(["BatchNormalization"] if version < 15 else [])}
    wrong |= {"Softmax", "LogSoftmax", "Hardmax"} if version < 13 else set()
    return all(node.op_type not in wrong for node in flat.graph.node)


def _has_groups(node: onnx.NodeProto) -> bool:
    return any(held.name == "group" and held.i > 1 for held in node.attribute)


def _off(true: float, reported: float) -> float:
    return abs(true - reported) / max(abs(true), abs(reported), 1e-30) if math.isfinite(reported) else 0.0


def _general(reason: str) -> str:
    """A reason without names."""
    return " ".join(w for w in reason.split() if not any(c.isdigit() for c in w))[:70]


def _equal(a: list[list[Any]], b: list[list[Any]], fine: float, few: float = 0.0) -> bool:
    """Whether values are alike, but for a few of them: a value near a threshold may fall on its other side."""
    return all(
        np.isclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=fine, atol=fine, equal_nan=True).mean()
        >= 1 - few
        if np.size(x)
        else np.shape(x) == np.shape(y)
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    )
