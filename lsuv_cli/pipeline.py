"""One request, from the model to the report: prepare, scale, write, verify, publish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from lsuv_cli import calibration_data, dumps, interruption, layer_details, layer_reports, outputs
from lsuv_cli.data import random_data
from lsuv_cli.data.batches import Calibration, Data
from lsuv_cli.details import Details
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.layer_reports import Entries, Findings
from lsuv_cli.memory import available_memory
from lsuv_cli.model import batch_norm, exposure, layers, prepare, stripping
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.draft import Draft, earlier_metadata
from lsuv_cli.model.file import ModelFile
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import LayerSet
from lsuv_cli.model.prepare import Look, Prepared
from lsuv_cli.outputs import StrPath, Target
from lsuv_cli.progress import Listener
from lsuv_cli.report import Carried, Report
from lsuv_cli.results import Exposed, Initialized, Stripped
from lsuv_cli.scaling import algorithm, devices, memory_needs, residuals, runner, stages, values, verification, weights
from lsuv_cli.scaling import branches as which
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.providers import Device
from lsuv_cli.scaling.residuals import Sum
from lsuv_cli.scaling.runner import Pass, drawn_ahead
from lsuv_cli.scaling.running_weights import pre_initialized
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.scaling.verification import ModelMoments, Wanted
from lsuv_cli.settings import Bias, PreInit, Residual, Scale, Settings
from lsuv_cli.version import __version__

# The room `home` is entered only where weights go home, because its modules take time to import.
if TYPE_CHECKING:
    from lsuv_cli.home.checkpoints import Checkpoint
    from lsuv_cli.home.matching import Matching
    from lsuv_cli.home.names import Homes
    from lsuv_cli.workers.crew import Crew

Array = NDArray[Any]

# The fraction of the available memory that the frontier may take before values go to a file.
FRONTIER_RATIO = 0.5
# A variance is measured ten times as accurately as it is judged, within these bounds.
FINEST_ACCURACY, COARSEST_ACCURACY = 1e-6, 1e-3


@dataclass(frozen=True)
class _Run:
    """What a request works on: the model as given, the data, the device."""

    look: Look
    branches: Mapping[str, bool]
    data: Calibration | None
    device: Device


@dataclass
class Job:
    """One request, from the model to the report."""

    file: ModelFile
    settings: Settings
    data: Data | Sequence[str] | None
    listen: Listener
    like: Checkpoint | None = None  # the network's checkpoint as it was exported
    details: bool = False  # look closely at every layer, for a page
    with_sums: bool = False  # measure residual sums too
    calibration: Calibration | None = None  # the data, once it is read
    crew: Crew | None = None  # the workers, if there are any
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    begun_phase: float = 0.0

    def initialize(self, output: Target | None, weights_file: Target | None, dry_run: bool) -> Initialized:
        """Prepare, scale, verify, publish."""
        settings = self.settings
        if settings.rescale and self.data is None and not dry_run:
            raise LsuvError("scaling needs data: give `data`, or `rescale=False` to stop after the pre-initialization")
        measuring = {
            "bias='center'": settings.bias is Bias.CENTER,
            "scale='channel'": settings.scale is Scale.CHANNEL,
            "residual='bounded'": settings.residual is Residual.BOUNDED,
        }
        for chosen in (name for name, is_chosen in measuring.items() if is_chosen and not settings.rescale):
            raise LsuvError(f"`{chosen}` needs measured outputs; `rescale=False` stops before them")
        bounded = weights.bounded_threads(self._threads)
        with self._guesses_told(), bounded, Draft(self.file, None if dry_run else output) as draft:
            run = self._open()
            # The model as given is measured here, because it is edited in place afterwards.
            files = layer_details.fingerprints(self.file) if self.details else {}
            before = self._measured("before", self.file, run.look, run).moments if settings.before and run.data else {}
            homes = self._homes(run.look) if weights_file is not None and self.like is None else None
            matched = self._matching(run.look) if self.like is not None else None
            prepared = prepare.prepare(draft, run.look, settings, run.branches)
            self.warnings += prepared.warnings
            plan = self._plan(prepared)
            findings = Findings(plan, given=before)
            trials = 0
            if not dry_run:
                self._pre_initialize(draft, prepared)
                findings, trials = self._fill(draft, prepared, findings, run)
            found = layer_reports.of_initialization(prepared, findings, settings, dry_run)
            tensors, account = self._tensors_for_home(prepared, homes, matched) if not dry_run else (None, None)
            entries, account = layer_reports.judged_at_home(found, account, prepared)
            report = self._report(
                "init",
                entries,
                run,
                details=self._details(prepared.graph, prepared.every, entries, findings, files),
                output=None if dry_run or output is None else str(output.given),
                stages=len(findings.plan.stages),
                trials=trials,
                memory=_memory_expected(prepared, plan, run.data) if dry_run else {},
                carried=account,
                sums=layer_reports.of_sums(
                    self._sums(prepared.graph, prepared.every), prepared.every, findings.verified
                ),
            )
            if not dry_run:
                self._publish(draft, tensors, weights_file, report)
            home = tensors if matched is not None else None
            return Initialized(report, home, _file=draft.in_memory() if dry_run else draft.result)

    def _plan(self, prepared: Prepared) -> Plan:
        graph, chosen = prepared.graph, prepared.layers.layers
        if self.settings.residual is Residual.KEEP:
            return stages.cut(graph, chosen)
        depth = stages.depths(graph, chosen)
        sums = residuals.find(graph, prepared.every.layers, depth)
        return stages.cut(graph, chosen, sums=residuals.bounded(sums, chosen, depth, self.settings.target_variance))

    def _sums(self, graph: Graph, every: LayerSet) -> tuple[Sum, ...]:
        """The residual sums, where they are wanted."""
        if not (self.with_sums or self.details) and self.settings.residual is Residual.KEEP:
            return ()
        return residuals.find(graph, every.layers, stages.depths(graph, every.layers))

    def _tensors_for_home(
        self, prepared: Prepared, homes: Homes | None, matched: Matching | None
    ) -> tuple[dict[str, Array] | None, Carried | None]:
        """The tensors for a file of weights, by value or by name, and an account of them."""
        if matched is not None:
            from lsuv_cli.home import carrying

            tensors, account, warnings = carrying.carry(matched, prepared.graph, prepared.graph.array)
            self.warnings += warnings
            return tensors, account
        if homes is None:
            return None, None
        from lsuv_cli.home import named

        self.warnings += named.assumed(prepared, homes)
        return named.collect(prepared, homes, self._writes_recurrent)

    def _publish(
        self, draft: Draft, tensors: Mapping[str, Array] | None, weights_file: Target | None, report: Report
    ) -> None:
        """Rename the results into place, the model first: if that fails, no result is written."""
        streams = [target for target in (draft.target, weights_file) if target is not None and target.stream]
        with contextlib.ExitStack() as stack:
            if weights_file is not None:
                from lsuv_cli.home import checkpoints, named

                made = stack.enter_context(outputs.growing(weights_file))
                if self.like is not None:
                    checkpoints.write(made, tensors or {}, self.like.metadata)
                else:
                    checkpoints.write(made, named.storable(tensors or {}, made), {"format": "pt"})
            # The reader of a pipe may take arbitrarily long, so requests to stop are not held for a stream.
            with contextlib.nullcontext() if streams else interruption.held():
                draft.publish()
                if weights_file is not None:
                    weights_file.deliver(made)
                if draft.target is not None:
                    interruption.published(int(report.exit_code))

    def targets(
        self,
        drawn: Mapping[str, StrPath] | None,
        wanted: Mapping[str, StrPath | None] | None = None,
        force: bool = False,
        *,
        beside: bool = True,
    ) -> dict[str, Target]:
        """The files to be written, by the arguments that name them, checked against everything that is read."""
        sources = [] if self.file.path is None else [self.file.path, *self.file.data_files]
        sources += calibration_data.files_of(self.data)
        if self.like is not None and self.like.path is not None:
            sources.append(self.like.path)
        option = "`output`" if beside and self.file.has_external_data else ""
        return outputs.check(wanted or {}, sources, force=force, drawn=drawn, data_beside=option)

    def expose(self, target: Target | None) -> Exposed:
        """Add the layers' outputs to the graph's outputs, and write the model."""
        graph, _ = self._flat(graphs.build(self.file.proto, self.file), None)
        look = prepare.layers_of(graph)
        chosen = self.settings.include, self.settings.exclude
        selected = layers.choose(look.layers, *chosen)
        with Draft(self.file, target) as draft:
            shown = exposure.expose(self.file.proto, look, selected.layers)
            skipped = layers.skipped_among(look.layers, *chosen)
            self.warnings += exposure.told(shown.hidden, selected.recurrent, skipped)
            if not shown.layers:
                why = f" ({self.warnings[0]})" if self.warnings else ""
                raise LsuvError(f"{self.file.name} has no layer whose output can be put out{why}; nothing was written")
            draft.finish(earlier_metadata(self.file.proto))
            draft.publish()
        outputs_of = {layer.name: output for layer, output in shown.layers}
        return Exposed(outputs_of, tuple(self.warnings), _file=draft.result)

    def strip(self, target: Target | None, keep: Sequence[str], larger_than: int) -> Stripped:
        """Take the values out of the model's tensors, and write the model."""
        graph = graphs.build(self.file.proto, self.file)
        done = stripping.strip(self.file, graph, keep, larger_than)
        with Draft(self.file, target) as draft:
            draft.finish(earlier_metadata(self.file.proto))
            draft.publish()
        roles_of = {name: str(role) for name, role in done.roles.items()}
        return Stripped(roles_of, done.bytes, tuple(done.kept), tuple(done.warnings), _file=draft.result)

    def as_it_stands(self, command: str, dump: Path | None = None) -> Report:
        """Report on a model without changing it: its layers and, with data, the moments of their outputs.

        With `dump`, the values themselves are written into that directory.
        """
        with self._guesses_told():
            return self._look(command, dump)

    @contextlib.contextmanager
    def _guesses_told(self) -> Iterator[None]:
        """If a model cannot run on random data, the lengths that were guessed for it may be why."""
        try:
            yield
        except ModelError as problem:
            data = self.calibration
            guesses = [warning for warning in (data.warnings if data else ()) if "`input_shapes`" in warning]
            raise type(problem)("; ".join([str(problem), *guesses[:3]])) from problem

    def _look(self, command: str, dump: Path | None) -> Report:
        run = self._open()
        graph, every = run.look.graph, layers.with_targets(run.look.layers, self.settings.target_variance)
        selected = layers.choose(every, self.settings.include, self.settings.exclude)
        if command == "measure" and not selected.layers:
            raise ModelError(f"{self.file.name} has no layer to judge{layers.why_none(every)}")
        self.warnings += batch_norm.training_mode(graph)
        self.warnings += (
            layer_reports.aimed_elsewhere(earlier_metadata(self.file.proto)) if command == "measure" else []
        )
        phase = "inspecting" if command == "inspect" else "measuring"
        sums = self._sums(graph, every)
        wanted = Wanted(command == "inspect", sums=tuple(each.output for each in sums))
        measured = self._measured(phase, self.file, run.look, run, wanted) if run.data else ModelMoments({})
        if dump is not None:
            if run.data is None:
                raise LsuvError("values to write come from data: give `data`")
            found = values.layer_outputs(run.look, selected.layers, self._pass("writing", run.data, run.device))
            named_values = ((layer.name, layer.output, array) for layer, array in found)
            dumps.write(dump, [layer.name for layer in selected.layers], named_values)
        plan = stages.cut(graph, selected.layers)
        judged = self.settings if command == "measure" else None
        findings = Findings(plan, measured.moments, outputs=measured.outputs)
        entries = layer_reports.of_measurement(graph, every, selected, findings, judged)
        files = layer_details.fingerprints(self.file) if self.details else {}
        details = self._details(graph, every, entries, findings, files)
        shown = layer_reports.of_sums(sums, every, measured.moments)
        return self._report(command, entries, run, stages=len(plan.stages), sums=shown, details=details)

    @property
    def _threads(self) -> int | None:
        """The threads of this process: as asked, or as many as a worker has, so that both compute the same bits."""
        return self.settings.threads if self.crew is None else self.crew.cluster.threads

    @property
    def _writes_recurrent(self) -> bool:
        return self.settings.recurrent and self.settings.pre_init is not PreInit.KEEP

    def _homes(self, look: Look) -> Homes:
        """The names that the model's tensors have in a PyTorch module."""
        from lsuv_cli.home import names

        return names.find(self.file.proto, look)

    def _matching(self, look: Look) -> Matching:
        """Match the model's tensors to those of the network's checkpoint by their values."""
        from lsuv_cli.home import matching

        assert self.like is not None
        matched = matching.match(look.graph, look.layers, look.graph.array, self.like)
        self.warnings += matched.warnings
        return matched

    def _open(self) -> _Run:
        """The first look at the model, the data that fits it, and the device."""
        device = devices.open_device(self.settings.device, self._threads)
        first = graphs.build(self.file.proto, self.file)
        data = self._calibration(first) if self.data is not None else None
        graph, branches = self._flat(first, self._pass("branches", data, device) if data else None)
        self.warnings += which.undecided(graph) if data else []
        look = prepare.layers_of(graph)
        fitting = _fitting(look, data, device) if data else None
        if self.crew is not None and fitting is not None:
            self.crew.share_out(fitting.batches, fitting.files)
        return _Run(look, branches, fitting, device)

    def _flat(self, graph: Graph, needs: Pass | None) -> tuple[Graph, dict[str, bool]]:
        """The working copy, with the branch of each If that all data takes in its place, and those branches."""
        branches: dict[str, bool] = {}
        # A taken branch may have another If inside, hence the loop.
        while more := {k: taken for k, taken in which.taken(graph, needs).items() if k not in branches}:
            branches |= more
            graph = graphs.build(self.file.proto, self.file, branches)
        return graph, branches

    def _pass(self, phase: str, data: Calibration, device: Device) -> Pass:
        given = self.settings.memory
        accuracy = min(max(self.settings.tol / 10, FINEST_ACCURACY), COARSEST_ACCURACY)
        memory = int(FRONTIER_RATIO * available_memory()) if given is None else given
        return Pass(
            data.batches,
            device,
            memory,
            lambda done, total: self.listen(phase, done, total),
            accuracy,
            data.few,
            self.crew,
        )

    def _calibration(self, graph: Graph) -> Calibration:
        """The data, read once for a job, or given by an earlier job on the same model."""
        if self.calibration is None:
            assert self.data is not None
            self.calibration = calibration_data.read(self.data, calibration_data.specs(graph), self.settings)
        self.warnings += self.calibration.warnings
        return self.calibration

    def _pre_initialize(self, draft: Draft, prepared: Prepared) -> None:
        """Pre-initialize the layers that are not scaled: recurrent layers; with `rescale=False`, every layer."""
        kind, seed, graph = self.settings.pre_init, self.settings.seed, prepared.graph
        if kind is PreInit.KEEP:
            return
        for item in prepared.layers.recurrent if self.settings.recurrent else ():
            for weight, form in item.weights:
                matrices = weights.pre_initialize(kind, form.shape, weights.stream(seed, weight.base))
                draft.store(graph.tensors[weight.base], weight.stored(form.weight(matrices, weight.shape)))
        if self.settings.rescale:
            return
        first = {base: users[0] for base, users in layers.by_tensor(prepared.layers.layers).items()}
        drawn = drawn_ahead(list(first.values()), kind, seed, self.crew)
        for base, layer in first.items():
            draft.store(graph.tensors[base], pre_initialized(graph, layer, kind, seed, drawn))

    def _fill(self, draft: Draft, prepared: Prepared, findings: Findings, run: _Run) -> tuple[Findings, int]:
        """Scale the layers, unless `rescale=False`; write the file and measure every layer in it."""
        measured = ModelMoments({})
        by_channel = frozenset(x.output for x in prepared.layers.layers if x.by_channel or x.is_centred)
        wanted = Wanted(channels=by_channel, sums=tuple(s.output for s in self._sums(prepared.graph, prepared.every)))

        def verify() -> Mapping[str, Moments]:
            nonlocal measured
            self._took("calibration", self.begun_phase)
            begun = time.perf_counter()
            written = draft.finish(self._metadata(run.data))
            self._took("writing", begun)
            if run.data is not None:
                measured = self._measured("verifying", written, prepare.look(written, run.branches), run, wanted)
            self.begun_phase = time.perf_counter()
            return measured.moments

        self.begun_phase = time.perf_counter()
        if self.settings.rescale and run.data is not None:
            needs = self._pass("scaling", run.data, run.device)
            scaled = algorithm.lsuv(draft, prepared, findings.plan, self.settings, needs, verify)
            findings = replace(
                findings,
                plan=scaled.plan,
                turns=scaled.turns,
                verified=scaled.verified,
                of_live_uses=scaled.of_live_uses,
                noise=scaled.noise,
            )
        else:
            findings, scaled = replace(findings, verified=verify()), None
        self.warnings += measured.warnings
        return replace(findings, outputs=measured.outputs), scaled.trials if scaled else 0

    def _details(
        self,
        graph: Graph,
        every: layers.LayerSet,
        entries: Entries,
        findings: Findings,
        files: Mapping[str, str],
    ) -> Details | None:
        return layer_details.of_run(graph, every, entries, findings, files) if self.details else None

    def _measured(
        self,
        phase: str,
        file: ModelFile,
        look: Look,
        run: _Run,
        wanted: Wanted = Wanted(),  # noqa: B008
    ) -> ModelMoments:
        """The moments of every layer's output in a model as it stands."""
        begun = time.perf_counter()
        assert run.data is not None
        needs = self._pass(phase, run.data, run.device)
        # The model as given has one line in the page, no details.
        wanted = replace(wanted, details=self.details and phase != "before")
        measured = verification.measure(file, look, needs, wanted)
        self._took("verification" if phase == "verifying" else phase, begun)
        return measured

    def _took(self, phase: str, begun: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    def _metadata(self, data: Calibration | None) -> dict[str, str]:
        settings = self.settings
        entries = {
            "version": __version__,
            "seed": settings.seed,
            "pre_init": settings.pre_init,
            "bias": settings.bias,
            **({"scale": settings.scale} if settings.scale is not Scale.LAYER else {}),
            **({"residual": settings.residual} if settings.residual is not Residual.KEEP else {}),
            "target_variance": settings.target_variance if settings.rescale else "none",
            "tolerance": settings.tol,
            "samples": data.samples if data else 0,
            **({"data": data.source} if data and data.source == random_data.RANDOM else {}),
        }
        return {key: str(value) for key, value in entries.items()}

    def _report(
        self,
        command: str,
        entries: Entries,
        run: _Run,
        **facts: Any,
    ) -> Report:
        self._took("total", self.begun)
        data = run.data
        told = self.crew.told if self.crew is not None else []
        return Report(
            command=command,
            version=__version__,
            model=self.file.name,
            layers=tuple(entry for _, entry in entries),
            settings=self.settings.to_json(),
            device=str(run.device),
            device_reason=run.device.reason,
            data=data.source if data else "",
            samples=data.samples if data else 0,
            batches=len(data.batches) if data else 0,
            workers=self.crew.reports() if self.crew is not None else (),
            warnings=tuple(dict.fromkeys([*self.warnings, *run.device.refused, *told])),
            seconds={phase: round(seconds, 4) for phase, seconds in self.seconds.items()},
            **facts,
        )


def _fitting(look: Look, data: Calibration, device: Device) -> Calibration:
    """The data in smaller batches, if shapes tell that those chosen automatically do not fit where the stages run."""
    plan = stages.cut(look.graph, look.layers.layers)
    free = runner.free_memory(device)
    weights_there = max(memory_needs.stage_weights(look.graph, plan), verification.weights_at_once(look.graph))
    room = None if free is None else free - weights_there
    size = memory_needs.fitting_batch(look.graph, plan, data.batches[0], room)
    return data if size is None else data.at_most(size)


def _memory_expected(prepared: Prepared, plan: Plan, data: Calibration | None) -> dict[str, int | None]:
    between = memory_needs.between_stages(prepared.graph, plan, data.batches if data else ())
    return {
        "weights_of_a_stage": memory_needs.stage_weights(prepared.graph, plan),
        "values_between_stages": between,
    }
