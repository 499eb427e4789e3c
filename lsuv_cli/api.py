"""The whole job as one Python call: `initialize` and `measure`. The command line is a thin shell over them."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from lsuv_cli import algorithm, calibration, estimate, layers, norms, ownership, runtime, stages
from lsuv_cli import graph as graphs
from lsuv_cli.algorithm import Turn
from lsuv_cli.calibration import BatchSize, Calibration, Data, InputSpec
from lsuv_cli.datafiles import available_memory
from lsuv_cli.draft import Draft
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.graph import Graph
from lsuv_cli.layers import Found, Layer
from lsuv_cli.modelfile import ModelFile, load
from lsuv_cli.moments import Moments
from lsuv_cli.ownership import Tied
from lsuv_cli.report import LayerReport, Report, Status
from lsuv_cli.version import __version__
from lsuv_cli.weights import PreInit

Array = NDArray[Any]
Model = str | os.PathLike[str] | bytes | onnx.ModelProto

# A model with more weights than this is verified in pieces.
VERIFY_BYTES = 512 << 20
# The share of the available memory that values between stages may take before they go to a file.
FRONTIER_SHARE = 0.5


class BiasMode(StrEnum):
    ZERO = "zero"
    KEEP = "keep"


@dataclass(frozen=True)
class Settings:
    """All that can be chosen; each is an option of the command with the same name."""

    pre_init: PreInit = PreInit.ORTHONORMAL
    rescale: bool = True
    bias: BiasMode = BiasMode.ZERO
    tol: float = 0.01
    max_trials: int = 10
    target_variance: float = 1.0
    seed: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tied: Tied = Tied.SHARE
    recurrent: bool = False
    reset_norm: bool = False
    before: bool = False
    batch_size: BatchSize = None
    limit: int | None = None
    device: str = "auto"
    threads: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("tol", 0.0, 1.0),
            ("target_variance", 0.0, math.inf),
            ("max_trials", 0, math.inf),
            ("threads", 0, 4096),
            ("memory", 0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (low < value and (value <= high and math.isfinite(value))):
                raise LsuvError(f"--{name.replace('_', '-')} is {value}; it must be above {low} and at most {high}")
        if self.seed < 0:
            raise LsuvError(f"--seed is {self.seed}; it must not be negative")
        # Plain strings are welcome from Python.
        for name, kind in (("pre_init", PreInit), ("bias", BiasMode), ("tied", Tied)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                choices = ", ".join(kind)
                raise LsuvError(f"--{name.replace('_', '-')} {getattr(self, name)!r} is not one of {choices}") from None


@dataclass(frozen=True)
class Initialized:
    """What `initialize` gives: the model (None if it was written to a file with external data), and the report."""

    model: onnx.ModelProto | None
    report: Report


Listener = Callable[[str, int, int], None]  # phase, steps done, steps in all


def _silent(phase: str, done: int, total: int) -> None:
    pass


def initialize(
    model: Model,
    data: Data | Sequence[str] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    dry_run: bool = False,
    listen: Listener = _silent,
    **settings: Any,
) -> Initialized:
    """Initialize a model's weights by LSUV.

    `model` is a path, the bytes of a file or a ModelProto (which is not changed). `data` is an array, a dict of
    arrays, an iterable of batches, or a list of file names as `--data` takes them. With `output` the result is
    written there. The other arguments are the fields of `Settings`.
    """
    return _Job(load(model), _settings(settings), data, listen).initialize(
        Path(output) if output is not None else None, force, dry_run
    )


def measure(model: Model, data: Data | Sequence[str], *, listen: Listener = _silent, **settings: Any) -> Report:
    """The variance of every layer's output in a model as it stands."""
    return _Job(load(model), _settings(settings), data, listen).measure()


def _settings(given: dict[str, Any]) -> Settings:
    known = {f.name for f in dataclasses.fields(Settings)}
    unknown = set(given) - known
    if unknown:
        raise TypeError(f"unknown settings {sorted(unknown)}; there are {sorted(known)}")
    for name in ("include", "exclude"):
        if isinstance(given.get(name), str):
            given = {**given, name: (given[name],)}
    return Settings(**given)


@dataclass
class _Job:
    file: ModelFile
    settings: Settings
    data: Data | Sequence[str] | None
    listen: Listener
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def initialize(self, output: Path | None, force: bool, dry_run: bool) -> Initialized:
        begun = time.perf_counter()
        chosen = self.settings
        if chosen.rescale and self.data is None and not dry_run:
            raise LsuvError("scaling needs data: give --data, or --no-rescale to stop after the pre-initialization")
        with Draft(self.file, None if dry_run else output, force=force) as draft:
            graph = graphs.build(self.file.proto)
            found = self._found(graph, draft)
            data = self._calibration(graph) if self.data is not None else None
            device = runtime.open_device(chosen.device, chosen.threads)
            everything = self._everything(graph, draft)
            given = self._measured("before", self.file, everything, data, device) if chosen.before and data else {}
            graph, found, decided = self._settled(draft, graph, found)
            keeps_bias = self._biases(draft, graph, found)
            if keeps_bias.changed:
                graph, found = self._again(draft, decided)
            self._norms(draft, graph, found)
            graph, found = self._again(draft, decided)
            self.warnings += norms.training_mode(graph, draft.array)
            plan = stages.cut(graph, found.layers, keeps_bias.kept, self._bytes(graph))
            turns: dict[str, Turn] = {}
            verified: dict[str, Moments] = {}
            trials = 0
            if not dry_run:
                metadata = self._metadata(data)
                self._recurrent(draft, found)
                if chosen.rescale and data is not None:
                    turns, verified, trials = self._trials(draft, graph, plan, data, device, metadata)
                else:
                    self._pre_initialize(draft, found)
                    written = draft.finish(metadata)
                    if data is not None:
                        verified = self._verified(written, data, device)
                draft.publish()
            planned = self._expected(graph, draft, plan, data) if dry_run else {}
            entries = self._entries(
                draft, graph, found, plan, turns, verified, given, decided, keeps_bias.kept, dry_run
            )
            self.seconds["total"] = time.perf_counter() - begun
            report = self._report("init", entries, data, device, plan, trials, None if dry_run else output)
            report = replace(report, memory=planned)
            model = None if draft.scratch is not None and self.file.has_external_data else self.file.proto
            return Initialized(model, report)

    def measure(self) -> Report:
        begun = time.perf_counter()
        graph = graphs.build(self.file.proto)
        found = layers.find(graph, self._reader(graph))
        data = self._calibration(graph)
        device = runtime.open_device(self.settings.device, self.settings.threads)
        self.warnings += norms.training_mode(graph, self._reader(graph))
        verified = self._measured("measure", self.file, found, data, device)
        chosen = layers.choose(found, self.settings.include, self.settings.exclude)
        plan = stages.cut(graph, found.layers, (), {})
        entries = []
        for layer in found.layers:
            status = self._judged(verified.get(layer.output)) if layer in chosen.layers else Status.EXCLUDED
            entries.append((layer.node, self._entry(layer, status, verified, plan, None)))
        entries += [(s.node, _skipped(s)) for s in found.skipped]
        entries += [(r.node, _recurrent_entry(r, Status.OK)) for r in found.recurrent]
        self.seconds["total"] = time.perf_counter() - begun
        return self._report("measure", [e for _, e in sorted(entries, key=lambda x: x[0])], data, device, plan, 0, None)

    # Parts of the job

    def _reader(self, graph: Graph) -> Callable[[str], Array]:
        return lambda name: self.file.array(graph.tensors[name])

    def _found(self, graph: Graph, draft: Draft) -> Found:
        found = self._everything(graph, draft)
        if not found.layers and not found.recurrent:
            why = f" ({found.skipped[0].name}: {found.skipped[0].reason})" if found.skipped else ""
            raise ModelError(f"{self.file.name} has no layer that can be initialized{why}; nothing was written")
        return layers.choose(found, self.settings.include, self.settings.exclude)

    def _everything(self, graph: Graph, draft: Draft) -> Found:
        return layers.find(graph, lambda name: self._stored(graph, draft, name))

    def _stored(self, graph: Graph, draft: Draft, name: str) -> Array:
        return draft.array(name) if draft.holds(name) else self.file.array(graph.tensors[name])

    def _calibration(self, graph: Graph) -> Calibration:
        specs = [_spec(name, info) for name, info in graph.inputs.items()]
        chosen = self.settings
        if isinstance(self.data, list | tuple) and self.data and all(isinstance(d, str) for d in self.data):
            data = calibration.read(self.data, specs, batch_size=chosen.batch_size, limit=chosen.limit)
        else:
            data = calibration.from_arrays(self.data, specs, batch_size=chosen.batch_size, limit=chosen.limit)  # type: ignore[arg-type]
        self.warnings += data.warnings
        return data

    def _settled(self, draft: Draft, graph: Graph, found: Found) -> tuple[Graph, Found, ownership.Ownership]:
        decided = ownership.settle_weights(draft, graph, found, self.settings.tied)
        if decided.changed:
            graph, found = self._again(draft, decided)
        else:
            found = layers.leave(found, decided.left_alone)
        shared = [users for users in layers.by_tensor(found.layers).values() if len(users) > 1]
        if shared:
            self.warnings.append(
                f"{len(shared)} weight{'s are' if len(shared) > 1 else ' is'} shared by several layers; if an "
                "exporter merged equal tensors, --tied untie gives each layer its own"
            )
        return graph, found, decided

    def _again(self, draft: Draft, decided: ownership.Ownership) -> tuple[Graph, Found]:
        """Look at the model anew after its structure was changed."""
        graph = graphs.build(self.file.proto)
        found = layers.choose(self._everything(graph, draft), self.settings.include, self.settings.exclude)
        return graph, layers.leave(found, decided.left_alone)

    def _biases(self, draft: Draft, graph: Graph, found: Found) -> _Biases:
        """Zero the biases, or keep them; the outputs of the layers that keep one which is not zero anyway."""
        kept, wanted, values = set(), {}, {}
        for layer in found.layers:
            if layer.bias is None:
                continue
            if not layer.bias.constant:
                kept.add(layer.output)
                continue
            value = self._constant(graph, draft, layer.bias.value)
            if not np.any(value) and bool(np.isfinite(value).all()):
                continue
            if self.settings.bias is BiasMode.KEEP:
                kept.add(layer.output)
            else:
                place = (layer.bias.node if layer.bias.node >= 0 else layer.node, layer.bias.position)
                wanted[place] = 0.0
                values[layer.bias.value] = value
        impossible, changed = ownership.overwrite(draft, graph, wanted, values)
        for layer in found.layers:
            if layer.bias is not None:
                place = (layer.bias.node if layer.bias.node >= 0 else layer.node, layer.bias.position)
                if place in impossible:
                    kept.add(layer.output)
        return _Biases(frozenset(kept), changed)

    def _constant(self, graph: Graph, draft: Draft, name: str) -> Array:
        return np.asarray(layers.evaluate(graph, lambda n: self._stored(graph, draft, n), name))

    def _norms(self, draft: Draft, graph: Graph, found: Found) -> None:
        stale = list(norms.behind(graph, found.layers))
        wanted = norms.resets(graph, stale)
        values = {}
        for k, position in wanted:
            name = graph.nodes[k].input[position]
            values[name] = self._constant(graph, draft, name)
        old = {k for (k, p), number in wanted.items() if np.any(values[graph.nodes[k].input[p]] != number)}
        if not old:
            return
        if self.settings.reset_norm:
            ownership.overwrite(draft, graph, wanted, values)
        else:
            self.warnings.append(
                f"{len(old)} BatchNormalization node{'s' if len(old) > 1 else ''} behind layers keep statistics of the "
                "old weights; --reset-norm sets them to mean 0 and variance 1"
            )

    def _expected(
        self, graph: Graph, draft: Draft, plan: stages.Plan, data: Calibration | None
    ) -> dict[str, int | None]:
        """The bytes that a run would take."""
        batches = data.batches if data else ()
        between = estimate.between_stages(graph, plan, batches, lambda name: self._stored(graph, draft, name))
        return {"weights_of_a_stage": estimate.stage_weights(graph, plan), "values_between_stages": between}

    def _recurrent(self, draft: Draft, found: Found) -> None:
        from lsuv_cli.weights import pre_initialize, stream

        kind = self.settings.pre_init
        if not self.settings.recurrent or kind is PreInit.KEEP:
            return
        for item in found.recurrent:
            for weight, form in item.weights:
                matrices = pre_initialize(kind, form.shape, stream(self.settings.seed, weight.base))
                draft.store(weight.base, weight.stored(form.weight(matrices, weight.shape)))

    def _pre_initialize(self, draft: Draft, found: Found) -> None:
        for users in layers.by_tensor(found.layers).values():
            if self.settings.pre_init is not PreInit.KEEP:
                array = algorithm.pre_initialized(draft, users[0], self.settings.pre_init, self.settings.seed)
                draft.store(users[0].weight.base, array)

    def _trials(
        self,
        draft: Draft,
        graph: Graph,
        plan: stages.Plan,
        data: Calibration,
        device: runtime.Device,
        metadata: dict[str, str],
    ) -> tuple[dict[str, Turn], dict[str, Moments], int]:
        chosen = self.settings
        turns: dict[str, Turn] = {}
        worst = math.inf
        for trial in range(1, chosen.max_trials + 1):
            begun = time.perf_counter()
            found = algorithm.scale_layers(
                draft,
                graph,
                plan,
                data.batches,
                device,
                pre_init=chosen.pre_init if trial == 1 else PreInit.KEEP,
                seed=chosen.seed,
                target=chosen.target_variance,
                memory=self._memory(),
                progress=lambda done, total: self.listen("scaling", done, total),
            )
            self._took("calibration", begun)
            turns = found if trial == 1 else {k: _continued(turns[k], found[k]) for k in turns}
            verified = self._verified(draft.finish(metadata), data, device)
            deviations = [
                abs(algorithm.pooled([verified[x.output] for x in users]).variance / chosen.target_variance - 1)
                for stage in plan.stages
                for users in layers.by_tensor(stage.layers).values()
                if all(turns[x.output].status is Status.OK for x in users)
            ]
            previous, worst = worst, max(deviations, default=0.0)
            if worst <= chosen.tol or not worst < 0.9 * previous:
                break
        return turns, verified, trial

    def _verified(self, written: ModelFile, data: Calibration, device: runtime.Device) -> dict[str, Moments]:
        begun = time.perf_counter()
        graph = graphs.build(written.proto)
        found = layers.find(graph, lambda name: written.array(graph.tensors[name]))
        verified = self._measured("verifying", written, found, data, device, graph)
        self._took("verification", begun)
        return verified

    def _measured(
        self,
        phase: str,
        file: ModelFile,
        found: Found,
        data: Calibration,
        device: runtime.Device,
        graph: Graph | None = None,
    ) -> dict[str, Moments]:
        graph = graph or graphs.build(file.proto)
        plan = stages.segments(graph, found.layers, self._bytes(graph), VERIFY_BYTES)
        tensors = graph.tensors
        return algorithm.verify(
            graph,
            plan,
            lambda name: file.array(tensors[name]),
            data.batches,
            device,
            self._memory(),
            lambda done, total: self.listen(phase, done, total),
        )

    def _took(self, phase: str, begun: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    def _memory(self) -> int:
        return self.settings.memory or int(FRONTIER_SHARE * available_memory())

    def _bytes(self, graph: Graph) -> dict[str, int]:
        return {name: math.prod(t.dims) * 4 for name, t in graph.tensors.items()}

    def _metadata(self, data: Calibration | None) -> dict[str, str]:
        chosen = self.settings
        found = {
            "version": __version__,
            "seed": chosen.seed,
            "pre_init": chosen.pre_init,
            "bias": chosen.bias,
            "target_variance": chosen.target_variance if chosen.rescale else "none",
            "tolerance": chosen.tol,
            "samples": data.samples if data else 0,
        }
        return {f"lsuv.{key}": str(value) for key, value in found.items()}

    # The report

    def _judged(self, moments: Moments | None) -> Status:
        if moments is None or not moments.finite:
            return Status.NOT_FINITE
        if moments.variance == 0.0:
            return Status.DEAD
        off = abs(moments.variance / self.settings.target_variance - 1)
        return Status.OK if off <= self.settings.tol else Status.OUTSIDE

    def _entry(
        self, layer: Layer, status: Status, verified: dict[str, Moments], plan: stages.Plan, turn: Turn | None
    ) -> LayerReport:
        moments = verified.get(layer.output)
        return LayerReport(
            name=layer.name,
            op=layer.op,
            status=status,
            stage=plan.stage_of.get(layer.output),
            weight=layer.weight.base,
            shape=layer.weight.shape,
            groups=layer.groups,
            dtype=layer.weight.dtype,
            place=layer.weight.place,
            variance_at_turn=turn.variance if turn else None,
            scale=turn.scale if turn else None,
            variance=moments.variance if moments else None,
            mean=moments.mean if moments else None,
            notes=layer.notes,
        )

    def _entries(
        self,
        draft: Draft,
        graph: Graph,
        found: Found,
        plan: stages.Plan,
        turns: dict[str, Turn],
        verified: dict[str, Moments],
        given: dict[str, Moments],
        decided: ownership.Ownership,
        keeps_bias: Collection[str],
        dry_run: bool,
    ) -> list[LayerReport]:
        every = self._everything(graph, draft)
        wanted = {layer.output for layer in found.layers}
        skipped = {s.node: s for s in found.skipped}
        users = layers.by_tensor(found.layers)
        entries: list[tuple[int, LayerReport]] = []
        for layer in every.layers:
            turn = turns.get(layer.output)
            tied = len(users.get(layer.weight.base, ())) > 1
            if layer.output not in wanted:
                left = skipped[layer.node]
                status = Status.EXCLUDED if left.excluded else Status.SKIPPED
                notes: tuple[str, ...] = (left.reason,)
            elif not turns:
                status, notes = Status.PLANNED if dry_run else Status.PRE_INITIALIZED, ()
            elif turn is not None and turn.status is not Status.OK:
                status, notes = turn.status, ()
            elif tied:
                first = [x for x in users[layer.weight.base] if x.output in turns]
                status = self._judged(algorithm.pooled([verified[x.output] for x in first]))
                notes = () if turn is not None else ("scaled at the first use of its weight",)
            else:
                status, notes = self._judged(verified.get(layer.output)), ()
            entry = self._entry(layer, status, verified, plan, turn)
            extra = [*entry.notes, *decided.notes.get(layer.output, ()), *notes]
            if layer.output in keeps_bias and layer.output in wanted:
                extra.append("bias kept")
            before = given.get(layer.output)
            entry = replace(
                entry,
                notes=tuple(dict.fromkeys(extra)),
                shared=tied,
                variance_given=before.variance if before else None,
                weight_std=_std(self._stored(graph, draft, layer.weight.base)),
            )
            entries.append((layer.node, entry))
        known = {layer.node for layer in every.layers}
        entries += [(s.node, _skipped(s)) for s in found.skipped if s.node not in known or s not in skipped.values()]
        for item in found.recurrent:
            done = self.settings.recurrent
            status = Status.PRE_INITIALIZED if done else Status.SKIPPED
            entries.append((item.node, _recurrent_entry(item, status)))
        return [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]

    def _report(
        self,
        command: str,
        entries: Sequence[LayerReport],
        data: Calibration | None,
        device: runtime.Device,
        plan: stages.Plan,
        trials: int,
        output: Path | None,
    ) -> Report:
        return Report(
            command=command,
            version=__version__,
            model=self.file.name,
            output=str(output) if output is not None else None,
            layers=tuple(entries),
            settings={k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.settings).items()},
            device=str(device),
            data=data.source if data else "",
            samples=data.samples if data else 0,
            batches=len(data.batches) if data else 0,
            stages=len(plan.stages),
            trials=trials,
            warnings=tuple(dict.fromkeys(self.warnings)),
            seconds={k: round(v, 4) for k, v in self.seconds.items()},
        )


@dataclass(frozen=True)
class _Biases:
    kept: frozenset[str]
    changed: bool


def _continued(before: Turn, now: Turn) -> Turn:
    """A layer's turn in a further trial: the first trial's variance, all trials' scale."""
    return Turn(before.variance, before.scale * now.scale, now.status if before.status is Status.OK else before.status)


def _skipped(item: layers.Skipped) -> LayerReport:
    status = Status.EXCLUDED if item.excluded else Status.SKIPPED
    return LayerReport(item.name, item.op, status, shape=item.shape, notes=(item.reason,))


def _recurrent_entry(item: layers.Recurrent, status: Status) -> LayerReport:
    note = {
        Status.SKIPPED: "recurrent; --recurrent makes its matrices orthonormal gate by gate",
        Status.PRE_INITIALIZED: "recurrent: pre-initialized gate by gate, not scaled",
    }.get(status, "recurrent")
    weight = item.weights[0][0]
    return LayerReport(
        item.name, item.op, status, weight=weight.base, shape=weight.shape, dtype=weight.dtype, notes=(note,)
    )


def _std(array: Array, chunk: int = 1 << 20) -> float:
    flat = array.reshape(-1)
    if not flat.size:
        return math.nan
    parts = [np.asarray(flat[k : k + chunk], np.float64) for k in range(0, flat.size, chunk)]
    with np.errstate(over="ignore", invalid="ignore"):
        mean = sum(float(p.sum()) for p in parts) / flat.size
        return math.sqrt(sum(float(np.square(p - mean).sum()) for p in parts) / flat.size)


def _spec(name: str, info: onnx.ValueInfoProto) -> InputSpec:
    """An input as the model declares it."""
    kind = info.type.tensor_type
    if not info.type.HasField("tensor_type"):
        raise ModelError(f"input {name!r} is no tensor ({info.type.WhichOneof('value')}); such models cannot be fed")
    names = {TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64"}
    dtype = names.get(kind.elem_type, TensorProto.DataType.Name(kind.elem_type).lower())  # type: ignore[call-overload]
    shape: tuple[int | str | None, ...] | None = None
    if kind.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.shape.dim)
    return InputSpec(name, dtype, shape)
