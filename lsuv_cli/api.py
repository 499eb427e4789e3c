"""The whole job as one Python call: `initialize`, `measure`, `inspect`, `compare`; and `doctor` for devices.

The command line is a thin shell over them.
"""

from __future__ import annotations

import contextlib
import inspect as inspect_module
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import onnx

from lsuv_cli import dumps, examination
from lsuv_cli.arguments import Call, InitializeKeywords, Keywords, checked
from lsuv_cli.data.sources import Data, Paths, as_sources
from lsuv_cli.data.streams import is_stream
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.examination import Diagnosis
from lsuv_cli.model import number_lists
from lsuv_cli.model.file import ModelFile, load
from lsuv_cli.outputs import StrPath
from lsuv_cli.pipeline import Job
from lsuv_cli.progress import Listener, silent
from lsuv_cli.report import Comparison, Report
from lsuv_cli.results import Exposed, Initialized, Stripped
from lsuv_cli.scaling import filling, runtime
from lsuv_cli.scratch import Scratch
from lsuv_cli.settings import (
    ABOUT,
    CHECK_TOL,
    EXAMINE,
    INSPECT,
    JUDGE,
    Bias,
    PreInit,
    Residual,
    Scale,
    Settings,
    SettingsDict,
)

__all__ = [
    "Data",
    "Diagnosis",
    "Exposed",
    "Initialized",
    "Model",
    "Paths",
    "Stripped",
    "compare",
    "doctor",
    "expose",
    "initialize",
    "inspect",
    "is_stream",
    "measure",
    "strip",
]

if TYPE_CHECKING:
    from lsuv_cli.home.checkpoints import Checkpoint
    from lsuv_cli.workers.crew import Crew

Model = str | os.PathLike[str] | bytes | onnx.ModelProto
LSUV = "lsuv"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "center": {"bias": Bias.CENTER},
    "channel": {"scale": Scale.CHANNEL},
    "bounded": {"residual": Residual.BOUNDED},
}
"""The options of LSUV that `compare` takes behind its name, as in lsuv+center."""
INITS = (LSUV, "orthonormal", "xavier", "msra", "keep")

Function = TypeVar("Function", bound=Callable[..., object])


_MODEL = """model: a path, the bytes of a file, or a ModelProto, which is not changed."""
_DATA = """data: in memory: an array (of numpy, or what numpy makes one of, such as a tensor on the CPU), a dict of
    arrays by input name, or an iterable of batches. A batch is an array, a dict, or a tuple or list of arrays
    for the inputs in their order; what follows them, such as labels, is left out. In files: a path or
    "NAME=PATH", a list of them, or a dict of paths by input name. "NAME=16000" for a number that is the same in
    every run, "LOADER.py:FUNCTION" for a function of yours that yields dicts of arrays, "random" for random
    numbers."""
_LISTEN = """listen: called with a phase, the steps done and the steps in all, as the work goes on."""
_DRAWN = """drawn: plots and pages of the report that the caller is going to write, paths by a name for messages. No
    output may be an input or another output, and these are checked with them."""
_DETAILS = """details: measure what a page shows beyond the numbers (`report.details`): histograms, channels, dead
    units, the graph's outline. The variances stay the same."""


def _documented(names: Iterable[str] = ABOUT, **defaults: object) -> Callable[[Function], Function]:
    """Complete a docstring: the arguments that all functions share, and the settings that matter to this one."""

    def complete(function: Function) -> Function:
        lines = []
        for name in names:
            default = defaults.get(name, getattr(Settings, name))
            shown = str(default) if isinstance(default, str) else repr(default)
            lines.append(f"{name}: {ABOUT[name].help} Default: {shown}.")
        assert function.__doc__ is not None
        shared = {"{model}": _MODEL, "{data}": _DATA, "{listen}": _LISTEN, "{drawn}": _DRAWN, "{details}": _DETAILS}
        shared["{settings}"] = "\n".join(lines)
        text = inspect_module.cleandoc(function.__doc__)  # Python 3.13 has done so already
        for mark, words in shared.items():
            text = text.replace(mark, words.replace("\n", "\n    "))
        function.__doc__ = text
        return function

    return complete


def _checkpoint(
    like: str | os.PathLike[str] | Mapping[str, Any] | None, weights: str | os.PathLike[str] | None
) -> Checkpoint | None:
    """The checkpoint of `like`, if there is one; a name for the weights that says no format is refused."""
    from lsuv_cli.home import checkpoints, named

    before = checkpoints.read(like) if like is not None else None
    if weights is not None:
        named.check(weights)
    return before


@_documented()
@checked
def initialize(
    model: Model,
    data: Data | Paths | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dry_run: bool = False,
    **keywords: Unpack[InitializeKeywords],
) -> Initialized:
    """Initialize a model's weights by LSUV.

    Arguments:
        {model}
        {data}
            None only with `rescale=False` or `dry_run=True`.
        output: where to write the initialized model; None for nowhere.
        weights: a .safetensors or .npz file for the initialized tensors alone, under the names they had in PyTorch.
        like: the network's checkpoint as it was exported, a .safetensors or .npz file or a mapping of names to arrays.
            Then `weights`, and the result's `weights`, are that whole checkpoint with the initialized values.
        dry_run: find the layers and plan the stages; change and write nothing.
        force: overwrite files that exist. Default: False.
        without_weights: make up the tensors whose data file is missing, by their role. (Tensors that `strip` took out
            are always made up.) A warning says how many there were. Default: False.
        {listen}
        {drawn}
        {details}

    Settings, the fields of `Settings`:
        {settings}

    Returns the model (None if its weights are in a file beside `output`) and the report.
    """
    call = Call.of(keywords, "force", "without_weights")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(model, filling=True, without_weights=call.without_weights))
        before = _checkpoint(like, weights) if like is not None or weights is not None else None
        job = Job(file, call.settings, as_sources(data), call.listen, before, call.details)
        wanted = {"`output`": None if dry_run else output, "`weights`": weights}
        targets = job.targets(call.drawn, wanted, call.force)
        if _without_values(file):
            target = targets.get("`output`")
            place = None if target is None or target.stream else stack.enter_context(Scratch(target.place.parent)).path
            job.warnings.append(filling.fill(file, call.settings.seed, place))
            targets = job.targets(call.drawn, wanted, call.force)  # a data file may go beside the model now
        job.crew = stack.enter_context(_crew(call.settings, wanted=not dry_run))
        return job.initialize(targets.get("`output`"), targets.get("`weights`"), dry_run)


@_documented(JUDGE, tol=CHECK_TOL)
@checked
def measure(
    model: Model,
    data: Data | Paths,
    **keywords: Unpack[Keywords],
) -> Report:
    """The variance of every layer's output in a model as it stands, judged by `tol`: `lsuv check`.

    Arguments:
        {model}
        {data}
        {listen}
        {drawn}
        {details}

    Settings that matter (the others are accepted too):
        {settings}
    """
    call = Call.of(keywords, tol=CHECK_TOL)
    if data is None:
        raise LsuvError("`measure` needs data: give `data`")
    with opened(model) as file:
        job = Job(file, call.settings, as_sources(data), call.listen, details=call.details)
        job.targets(call.drawn)
        with _crew(call.settings) as job.crew:
            return job.as_it_stands("measure")


@_documented(INSPECT)
@checked
def inspect(
    model: Model,
    data: Data | Paths | None = None,
    *,
    dump: StrPath | None = None,
    **keywords: Unpack[Keywords],
) -> Report:
    """The layers of a model and where their weights live; with data, the moments of their outputs.

    Arguments:
        {model}
        {data}
        dump: a new directory for the values themselves: an .npy file for each layer's output on all of the data.
        {listen}
        {drawn}
        {details}

    Settings that matter (the others are accepted too):
        {settings}
    """
    call = Call.of(keywords)
    with opened(model, filling=data is None) as file:
        place = dumps.check(dump, call.drawn or {}) if dump is not None else None
        job = Job(file, call.settings, as_sources(data), call.listen, details=call.details, with_sums=True)
        if missing := _without_values(file):
            job.warnings.append(f"{len(missing)} tensors have no values; give them some with `lsuv init`")
        job.targets(call.drawn)
        with _crew(call.settings, wanted=data is not None) as job.crew:
            return job.as_it_stands("inspect", place)


@checked
def expose(
    model: Model,
    output: StrPath | None = None,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    force: bool = False,
) -> Exposed:
    """The model with its layers' outputs as graph outputs, typed, in the order of execution, under their own names.

    Arguments:
        model: a path, the bytes of a file, or a ModelProto, which is not changed.
        output: where to write it; None for nowhere.
        include: only layers whose name matches.
        exclude: leave out layers whose name matches.
        force: overwrite files that exist.

    Returns the model (None if its weights are in a file beside `output`), and the name of each layer's output.
    """
    checked = Settings.of({"include": include, "exclude": exclude})
    with opened(model, filling=True) as file:
        job = Job(file, checked, None, silent)
        return job.expose(job.targets(None, {"`output`": output}, force).get("`output`"))


@_documented(name for name in ABOUT if name not in {"rescale", "before"})
@checked
def compare(
    model: Model,
    data: Data | Paths,
    inits: str | Sequence[str] = INITS,
    **keywords: Unpack[Keywords],
) -> Comparison:
    """A report for each of several initializations of the same model: a mapping. Nothing is written.

    Arguments:
        {model}
        {data}
        inits: names, as a list or with commas between them: "lsuv"; "lsuv" with options behind plus signs, as in
            "lsuv+center+channel" (bias="center", scale="channel"; "bounded" is residual="bounded"); "keep", the model
            as given; or another pre-initialization (see `pre_init`), which is then not scaled.
        {listen}
        {drawn}
        {details}

    Settings that matter (the others are accepted too); `pre_init` is for "lsuv":
        {settings}
    """
    listed = inits.split(",") if isinstance(inits, str) else list(inits) if isinstance(inits, Iterable) else [inits]
    names = [str(name).strip() for name in listed if str(name).strip()]
    call = Call.of(keywords)
    chosen = _initializations(names, call.settings)
    checked, listen = call.settings, call.listen
    if data is None:
        raise LsuvError("`compare` needs data: give `data`")
    sources = as_sources(data)
    reports = {}
    read = None  # once: a loader or a stream may give other data the next time, or none
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(model))
        Job(file, checked, sources, listen).targets(call.drawn)
        crew = stack.enter_context(_crew(checked))
        for name, settings in chosen.items():
            copy, used = (file, checked) if name == PreInit.KEEP else (file.copy(), settings)
            job = Job(copy, used, sources, listen, details=call.details, with_sums=True, calibration=read, crew=crew)
            if name == PreInit.KEEP:
                reports[name] = job.as_it_stands("measure")
            else:
                reports[name] = job.initialize(None, None, dry_run=False).report
            read = job.calibration
    return Comparison(_outlined_once(reports))


@checked
def strip(
    model: Model,
    output: StrPath | None = None,
    *,
    keep: str | Sequence[str] = (),
    larger_than: int = 1,
    force: bool = False,
) -> Stripped:
    """The model without its weights: each tensor's name, type, shape and role, and no values.

    Arguments:
        model: a path, the bytes of a file, or a ModelProto, which is not changed.
        output: where to write it; None for nowhere.
        keep: leave tensors whose name matches as they are.
        larger_than: leave tensors of this many values, and fewer, as they are.
        force: overwrite files that exist.

    Returns the model, and what was stripped. `initialize` gives such a model weights again.
    """
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    if isinstance(larger_than, bool) or not isinstance(larger_than, int) or larger_than < 0:
        raise LsuvError(f"`larger_than` {larger_than!r} is not a whole number of at least 0")
    with opened(model, filling=True, without_weights=True) as file:
        job = Job(file, Settings(), None, silent)
        target = job.targets(None, {"`output`": output}, force, beside=False).get("`output`")
        return job.strip(target, patterns, larger_than)


@_documented(EXAMINE)
@checked
def doctor(*, listen: Listener = silent, **settings: Unpack[SettingsDict]) -> Diagnosis:
    """What a device has, and whether it computes what the CPU computes, in every type: `lsuv doctor`.

    Arguments:
        {listen}

    Settings that matter (the others are accepted too):
        {settings}
    """
    return examination.examine(Settings.of(settings), listen)


def _initializations(names: Sequence[str], checked: Settings) -> dict[str, Settings]:
    """The settings of each initialization to compare; those that are not "lsuv" are not scaled."""
    unscaled = replace(
        checked,
        rescale=False,
        bias=Bias.ZERO if checked.bias is Bias.CENTER else checked.bias,
        scale=Scale.LAYER,
        residual=Residual.KEEP,
    )
    unknown = []
    found = {}
    for name in names:
        base, *options = name.split("+")
        if base == LSUV and all(option in OPTIONS for option in options):
            changes: dict[str, Any] = {key: value for option in options for key, value in OPTIONS[option].items()}
            found[name] = replace(checked, rescale=True, **changes)
        elif name in list(PreInit):
            found[name] = replace(unscaled, pre_init=PreInit(name))
        else:
            unknown.append(name)
    if unknown or not names:
        known = ", ".join([LSUV, *(f"{LSUV}+{option}" for option in OPTIONS), *PreInit])
        raise LsuvError(f"`inits` {','.join(unknown) or 'none'}: choose among {known}")
    return found


def _crew(settings: Settings, *, wanted: bool = True) -> contextlib.AbstractContextManager[Crew | None]:
    """The workers that the settings ask for, as long as the context lasts."""
    if settings.workers is None or not wanted:
        return contextlib.nullcontext()
    from lsuv_cli.workers.crew import crew

    return crew(settings)


@contextlib.contextmanager
def opened(model: Model, *, filling: bool = False, without_weights: bool = False) -> Iterator[ModelFile]:
    """Open a model. An unforeseen exception becomes a `ModelError` if onnxruntime refuses the model too.

    Unless they are going to be filled, tensors without values are an error.
    """
    file = load(model, without_weights=without_weights)
    missing = _without_values(file)
    if missing and not filling:
        raise ModelError(
            f"{file.name}: {len(missing)} tensors have no values, {missing[0]!r} the first; "
            "give them some with `lsuv init`"
        )
    try:
        yield file
    except (LsuvError, MemoryError):
        raise
    # A malformed model can break any library on the way; onnxruntime is asked who is at fault. It refuses every model
    # that has a tensor without values.
    except Exception as problem:
        if missing:
            raise
        as_given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
        if reason := runtime.refusal(as_given if isinstance(as_given, bytes) else os.fspath(as_given)):
            raise ModelError(f"{file.name}: onnxruntime does not take the model: {reason}") from problem
        raise


def _without_values(file: ModelFile) -> list[str]:
    """The names of what has no values: tensors, and lists of numbers in attributes."""
    return [tensor.name for tensor in file.absent] + [found.name for found in number_lists.stripped(file.proto)]


def _outlined_once(reports: dict[str, Report]) -> dict[str, Report]:
    """The reports of one graph, with the graph's outline in the first one only."""
    first = next(iter(reports.values()))
    return {
        name: replace(report, details=replace(report.details, outline=()))
        if report.details is not None and report is not first
        else report
        for name, report in reports.items()
    }
