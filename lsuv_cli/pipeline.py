"""One request, from the model to the report: prepare, scale, write, verify, publish."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from lsuv_cli import layer_reports as outcome
from lsuv_cli.data import batches as calibration
from lsuv_cli.data import random_data as madeup
from lsuv_cli.data.batches import Calibration, Data, InputSpec
from lsuv_cli.data.files import available_memory
from lsuv_cli.data.images import ImageOptions
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.home import carrying, checkpoints, matching, named, names
from lsuv_cli.home.checkpoints import Checkpoint
from lsuv_cli.model import batch_norm as norms
from lsuv_cli.model import graph as graphs
from lsuv_cli.model import layers
from lsuv_cli.model import prepare as preparation
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.file import ModelFile
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Found
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import LayerReport, Report, Status
from lsuv_cli.scaling import algorithm, runtime, stages, weights
from lsuv_cli.scaling import memory_needs as estimate
from lsuv_cli.scaling.algorithm import Turn
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.settings import PreInit, Settings
from lsuv_cli.version import __version__

Array = NDArray[Any]
Listener = Callable[[str, int, int], None]  # phase, steps done, steps in all

# A model with more weights than this is verified in pieces.
VERIFY_BYTES = 256 << 20
# The share of the available memory that values between stages may take before they go to a file.
FRONTIER_SHARE = 0.5


@dataclass(frozen=True)
class Initialized:
    """What `initialize` gives: the model (None if its weights are in a file beside the output), and the report.

    With `like`, `weights` is that checkpoint with the initialized values.
    """

    model: onnx.ModelProto | None
    report: Report
    weights: dict[str, Array] | None = None


@dataclass
class Job:
    """One request, from the model to the report."""

    file: ModelFile
    settings: Settings
    data: Data | Sequence[str] | None
    listen: Listener
    like: Checkpoint | None = None  # the network's own, as it was exported
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def initialize(self, output: Path | None, carried: Path | None, force: bool, dry_run: bool) -> Initialized:
        """Prepare, scale, verify, publish."""
        chosen = self.settings
        if chosen.rescale and self.data is None and not dry_run:
            raise LsuvError("scaling needs data: give --data, or --no-rescale to stop after the pre-initialization")
        device = runtime.open_device(chosen.device, chosen.threads)
        with Draft(self.file, None if dry_run else output, force=force) as draft:
            data = self._calibration(graphs.build(self.file.proto)) if self.data is not None else None
            given = self._measured("before", self.file, data, device) if chosen.before and data else {}
            homes = self._homes() if carried is not None and self.like is None else None
            matched = self._matching() if self.like is not None else None  # before the model is edited
            prepared = preparation.prepare(draft, chosen)
            self.warnings += prepared.warnings
            graph, read = prepared.graph, draft.reader(prepared.graph.tensors)
            multiplied = norms.multipliers(graph, prepared.found.layers, read)
            plan = stages.cut(graph, prepared.found.layers, prepared.keeps_bias, _bytes(graph), multiplied)
            turns: dict[str, Turn] = {}
            verified: dict[str, Moments] = {}
            trials, expected = 0, {}
            if dry_run:
                between = estimate.between_stages(graph, plan, data.batches if data else (), read)
                expected = {"weights_of_a_stage": estimate.stage_weights(graph, plan), "values_between_stages": between}
            else:
                self._pre_initialize(draft, prepared.found)
                if chosen.rescale and data is not None:
                    turns, verified, trials = self._scale(draft, prepared, plan, data, device)
                else:
                    written = draft.finish(self._metadata(data))
                    verified = self._measured("verifying", written, data, device) if data else {}
            entries = outcome.of_initialization(prepared, plan, turns, verified, given, chosen, read, dry_run)
            home, account = carrying.carry(matched, graph, read) if matched and not dry_run else (None, None)
            if not dry_run:
                if carried is not None and home is not None and self.like is not None:
                    checkpoints.write(carried, home, self.like.metadata)
                elif carried is not None and homes is not None:
                    tensors, account = named.collect(prepared, homes, read, self._writes_recurrent)
                    self.warnings += named.assumed(prepared, homes)
                    named.write(tensors, carried)
                draft.publish()
            report = self._report(
                "init",
                entries,
                data,
                device,
                output=None if dry_run or output is None else str(output),
                stages=len(plan.stages),
                trials=trials,
                memory=expected,
                carried=account,
            )
            external = draft.scratch is not None and self.file.has_external_data
            return Initialized(None if external else self.file.proto, report, home)

    def look(self, command: str) -> Report:
        """Only look: at the layers, and with data at what they put out."""
        graph = graphs.build(self.file.proto)
        read = self._reader(graph)
        every = layers.find(graph, read)
        chosen = layers.choose(every, self.settings.include, self.settings.exclude)
        data = self._calibration(graph) if self.data is not None else None
        device = runtime.open_device(self.settings.device, self.settings.threads)
        self.warnings += norms.training_mode(graph, read)
        phase = "inspecting" if command == "inspect" else "measuring"
        verified = self._measured(phase, self.file, data, device) if data else {}
        plan = stages.cut(graph, chosen.layers, (), _bytes(graph))
        judged = self.settings if command == "measure" else None
        entries = outcome.of_measurement(every, chosen, plan, verified, judged, read)
        return self._report(command, entries, data, device, stages=len(plan.stages))

    @property
    def _writes_recurrent(self) -> bool:
        return self.settings.recurrent and self.settings.pre_init is not PreInit.KEEP

    def _homes(self) -> names.Homes:
        """What the module calls the model's tensors, told by the file as it was exported."""
        graph = graphs.build(self.file.proto)
        read = self._reader(graph)
        return names.find(self.file.proto, graph, layers.find(graph, read), read)

    def _matching(self) -> matching.Matching:
        """Where the model's numbers are in the network's checkpoint."""
        assert self.like is not None
        graph = graphs.build(self.file.proto)
        read = self._reader(graph)
        found = matching.match(graph, layers.find(graph, read), read, self.like)
        self.warnings += found.warnings
        return found

    def _reader(self, graph: Graph) -> Callable[[str], Array]:
        return lambda name: self.file.array(graph.tensors[name])

    def _calibration(self, graph: Graph) -> Calibration:
        specs = [_spec(name, info) for name, info in graph.inputs.items()]
        size, limit = self.settings.batch_size, self.settings.limit
        given = self.data
        assert given is not None
        if isinstance(given, list | tuple) and given and all(isinstance(item, str) for item in given):
            names = [str(item) for item in given]
            if names == [madeup.RANDOM]:
                data = madeup.random(specs, batch_size=size, limit=limit, seed=self.settings.seed)
            else:
                pictures = ImageOptions(self.settings.mean, self.settings.std, self.settings.size)
                data = calibration.read(names, specs, batch_size=size, limit=limit, pictures=pictures)
        else:
            data = calibration.from_arrays(given, specs, batch_size=size, limit=limit)  # type: ignore[arg-type]
        self.warnings += data.warnings
        return data

    def _pre_initialize(self, draft: Draft, found: Found) -> None:
        """All that is not scaled: recurrent layers, and every layer where only this was asked for."""
        kind, seed = self.settings.pre_init, self.settings.seed
        if kind is PreInit.KEEP:
            return
        for item in found.recurrent if self.settings.recurrent else ():
            for weight, form in item.weights:
                matrices = weights.pre_initialize(kind, form.shape, weights.stream(seed, weight.base))
                draft.store(weight.base, weight.stored(form.weight(matrices, weight.shape)))
        for users in layers.by_tensor(found.layers).values() if not self.settings.rescale else ():
            draft.store(users[0].weight.base, algorithm.pre_initialized(draft, users[0], kind, seed))

    def _scale(
        self, draft: Draft, prepared: Prepared, plan: Plan, data: Calibration, device: runtime.Device
    ) -> tuple[dict[str, Turn], dict[str, Moments], int]:
        """Algorithm 1's loop: scale, write, verify what was written, and once more where that is not enough."""
        chosen = self.settings
        turns: dict[str, Turn] = {}
        worst = math.inf
        for trial in range(1, chosen.max_trials + 1):
            begun = time.perf_counter()
            found = algorithm.scale_layers(
                draft,
                prepared.graph,
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
            turns = {k: turns[k].then(found[k]) if turns else found[k] for k in found}
            begun = time.perf_counter()
            written = draft.finish(self._metadata(data))
            self._took("writing", begun)
            verified = self._measured("verifying", written, data, device)
            previous, worst = worst, self._worst(plan, turns, verified)
            if worst <= chosen.tol or not worst < 0.9 * previous:
                break
        return turns, verified, trial

    def _worst(self, plan: Plan, turns: Mapping[str, Turn], verified: Mapping[str, Moments]) -> float:
        """The largest deviation from the target among the layers that can be scaled."""
        deviations = [
            abs(algorithm.pooled([verified[x.output] for x in users]).variance / self.settings.target_variance - 1)
            for stage in plan.stages
            for users in layers.by_tensor(stage.layers).values()
            if all(turns[x.output].status is Status.OK for x in users)
        ]
        return max(deviations, default=0.0)

    def _measured(self, phase: str, file: ModelFile, data: Calibration, device: runtime.Device) -> dict[str, Moments]:
        """Every layer's output in a model as it stands, whole or in pieces."""
        begun = time.perf_counter()
        graph = graphs.build(file.proto)

        def read(name: str) -> Array:
            return file.array(graph.tensors[name])

        every = layers.find(graph, read).layers
        multiplied = norms.multipliers(graph, every, read)
        plan = stages.segments(graph, every, _bytes(graph), VERIFY_BYTES, multiplied)
        found = algorithm.verify(
            graph,
            plan,
            read,
            data.batches,
            device,
            self._memory(),
            lambda done, total: self.listen(phase, done, total),
            units=phase == "inspecting",
        )
        self._took("verification" if phase == "verifying" else phase, begun)
        return found

    def _took(self, phase: str, begun: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    def _memory(self) -> int:
        given = self.settings.memory
        return int(FRONTIER_SHARE * available_memory()) if given is None else given

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
            **({"data": data.source} if data and data.source == madeup.RANDOM else {}),
        }
        return {f"lsuv.{key}": str(value) for key, value in found.items()}

    def _report(
        self,
        command: str,
        entries: Sequence[LayerReport],
        data: Calibration | None,
        device: runtime.Device,
        **facts: Any,
    ) -> Report:
        self._took("total", self.begun)
        return Report(
            command=command,
            version=__version__,
            model=self.file.name,
            layers=tuple(entries),
            settings=self.settings.to_json(),
            device=str(device),
            data=data.source if data else "",
            samples=data.samples if data else 0,
            batches=len(data.batches) if data else 0,
            warnings=tuple(dict.fromkeys(self.warnings)),
            seconds={phase: round(seconds, 4) for phase, seconds in self.seconds.items()},
            **facts,
        )


def _bytes(graph: Graph) -> dict[str, int]:
    """What each stored tensor takes while it runs, in float32."""
    return {name: math.prod(tensor.dims) * 4 for name, tensor in graph.tensors.items()}


def _spec(name: str, info: onnx.ValueInfoProto) -> InputSpec:
    """An input as the model declares it."""
    kind = info.type.tensor_type
    if not info.type.HasField("tensor_type"):
        raise ModelError(f"input {name!r} is no tensor ({info.type.WhichOneof('value')}); such models cannot be fed")
    shape: tuple[int | str | None, ...] | None = None
    if kind.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
    return InputSpec(name, _dtype_name(kind.elem_type), shape)


def _dtype_name(code: int) -> str:
    """ONNX's element type under numpy's name."""
    if code in (TensorProto.STRING, TensorProto.BFLOAT16):
        return "string" if code == TensorProto.STRING else "bfloat16"
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code)).name
    except (KeyError, TypeError):
        raise ModelError(f"an input has the unknown element type {code}") from None
