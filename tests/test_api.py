# mypy: disable-error-code="arg-type,operator"
"""The Python functions: what they take, how they are typed and documented, and how their messages speak."""

import ast
import inspect
import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import pytest

import lsuv_cli
from helpers import layer_outputs, model, normal, tensor, values
from lsuv_cli import Bias, LsuvError, PreInit, Settings, SettingsDict, Tied, compare, initialize, measure
from lsuv_cli import settings as settings_module
from lsuv_cli.arguments import InitializeKeywords, Keywords
from lsuv_cli.cli.wording import ARGUMENTS, as_typed
from shell import lsuv

ROOT = Path(__file__).parent.parent
FUNCTIONS = [lsuv_cli.initialize, lsuv_cli.measure, lsuv_cli.inspect, lsuv_cli.compare]
WITHOUT_SETTINGS = [lsuv_cli.expose, lsuv_cli.strip]
TEXT = "g (float[N,4] x) => (float[N,4] y) { a = MatMul(x, W) b = Relu(a) y = MatMul(b, V) }"
X = normal(64, 4)


def two_layers() -> onnx.ModelProto:
    return model(TEXT, W=normal(4, 4, seed=1), V=normal(4, 4, seed=2))


# Names


def test_dir_shows_the_public_names_and_each_is_there():
    assert dir(lsuv_cli) == sorted(lsuv_cli.__all__)
    for name in lsuv_cli.__all__:
        assert getattr(lsuv_cli, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        lsuv_cli.initialise  # noqa: B018


def test_the_names_of_requests_reports_and_errors_are_public():
    wanted = {"LsuvError", "ModelError", "DataError", "DeviceError", "OutputError", "ExitCode", "Report", "LayerReport"}
    wanted |= {"Status", "Initialized", "Settings", "SettingsDict", "PreInit", "Bias", "Scale", "Residual", "Tied"}
    wanted |= {"__version__", "doctor", "Diagnosis", "Exposed", "Stripped", "Comparison"}
    assert wanted | {function.__name__ for function in [*FUNCTIONS, *WITHOUT_SETTINGS]} == set(lsuv_cli.__all__)


def test_the_package_imports_nothing_heavy_before_a_function_is_asked_for():
    code = (
        "import sys, lsuv_cli; lsuv_cli.Settings(); lsuv_cli.LsuvError; dir(lsuv_cli)\n"
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'rich', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Types


def test_the_keywords_are_the_settings():
    assert list(get_type_hints(SettingsDict)) == list(get_type_hints(Settings))


def test_every_setting_fits_its_own_keyword():
    """A value that `Settings` holds is one that the keyword takes, so `**settings.keywords()` is sound."""
    wide = {name: set(get_args(kind) or [kind]) for name, kind in get_type_hints(SettingsDict).items()}
    for name, kind in get_type_hints(Settings).items():
        if not isinstance(getattr(Settings(), name), tuple):  # a tuple is a Sequence
            assert set(get_args(kind) or [kind]) & wide[name], name
    assert Settings.of(Settings(seed=3, exclude=("a", "b")).keywords()) == Settings(seed=3, exclude=("a", "b"))


@pytest.mark.parametrize("kind", [PreInit, Bias, Tied])
def test_the_names_that_a_keyword_takes_are_the_values_of_its_enumeration(kind: type[StrEnum]):
    assert list(get_args(getattr(settings_module, f"{kind.__name__}Name"))) == list(kind)


SNIPPET = """
from pathlib import Path
from typing import Any
import numpy as np
from numpy.typing import NDArray
from lsuv_cli import LsuvError, PreInit, Report, Settings, compare, initialize, inspect, measure

class Tensor:
    def __array__(self, dtype: Any = None) -> NDArray[np.float32]:
        return np.zeros(1, np.float32)

x = np.zeros((4, 4), np.float32)
report: Report = initialize("m", x, tol=0.1, seed=3, pre_init="keep", bias="zero", exclude="a").report
initialize(Path("m"), {"x": x}, pre_init=PreInit.MSRA, include=["a"], batch_size="all", mean=(0.5,), memory="8G")
initialize(b"m", [[x, x], [x, x]], output=Path("o"), force=True)
initialize("m", [Tensor(), Tensor()], **Settings(seed=3).keywords())
measure("m", "calib.npy", target_variance=2)
measure("m", (pair for pair in [(Tensor(), Tensor())]), limit=None)
inspect("m", Path("calib.npy"), device="cpu", threads=2)
inspect("m", {"x": Path("x.npy"), "y": Path("y.npy")})
compare("m", ["x=x.npy", "y=y.npy"], "lsuv,keep", seed=1)["lsuv"].to_json()

initialize("m", x, tolerance=0.1)  # wrong
initialize("m", x, seed="three")  # wrong
initialize("m", x, pre_init="he")  # wrong
initialize("m", x, bias=0)  # wrong
initialize("m", 3)  # wrong
initialize("m", x, batch_size="some")  # wrong
initialize("m", x, exclude=3)  # wrong
initialize("m", x, verbose=True)  # wrong
initialize("m", x, force="yes")  # wrong
measure("m", x, force=True)  # wrong
measure("m", x, tol="0.1")  # wrong
measure("m")  # wrong
inspect("m", x, threads=1.5)  # wrong
compare("m", x, inits=3)  # wrong
compare("m", x, rescale="no")  # wrong
"""


def test_mypy_takes_right_arguments_and_rejects_wrong_ones(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(tmp_path / "snippet.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout + done.stderr


def test_an_unknown_keyword_is_a_type_error():
    for function in FUNCTIONS:
        with pytest.raises(TypeError, match="unknown settings tolerance; there are batch_size, before, bias"):
            function(two_layers(), X, tolerance=0.1)


def test_a_keyword_of_initialize_alone_is_unknown_elsewhere():
    for function in set(FUNCTIONS) - {lsuv_cli.initialize}:
        with pytest.raises(TypeError, match="unknown settings force"):
            function(two_layers(), X, force=True)


# Documentation


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_parameter_is_documented(function):
    documented = re.findall(r"^        (\w+): \S", inspect.getdoc(function).replace("\n    ", "\n        "), flags=re.M)
    kind = InitializeKeywords if function is lsuv_cli.initialize else Keywords
    own_too = ("force", "without_weights", "listen", "drawn", "details")
    shared = [name for name in own_too if name in get_type_hints(kind)]
    own = [name for name in inspect.signature(function).parameters if name != "keywords"] + shared
    assert documented[: len(own)] == own
    assert set(documented[len(own) :]) <= set(get_type_hints(Settings))
    assert {"batch_size", "device", "seed"} <= set(documented)
    assert "{" not in function.__doc__.replace("{'", "")


def test_initialize_documents_every_setting_and_the_defaults_are_true():
    text = inspect.getdoc(lsuv_cli.initialize)
    for name in get_type_hints(Settings):
        default = getattr(Settings(), name)
        assert re.search(rf"^    {name}: .* Default: {re.escape(str(default))}\.$", text, flags=re.M), name
    assert "Default: 0.1." in inspect.getdoc(lsuv_cli.measure)


# Values


def test_plain_values_become_what_settings_hold():
    given: dict[str, Any] = {
        "pre_init": "msra", "bias": "keep", "tied": "untie", "seed": np.int64(3), "tol": np.float32(0.5),
        "exclude": "fc*", "include": ["a", "b"], "mean": "0.5,0.25,1", "std": 2, "memory": "1.5K", "batch_size": "7",
    }  # fmt: skip
    held = Settings.of(given)
    assert held == Settings(
        PreInit.MSRA, bias=Bias.KEEP, tied=Tied.UNTIE, seed=3, tol=0.5, exclude=("fc*",), include=("a", "b"),
        mean=(0.5, 0.25, 1.0), std=(2.0,), memory=1536, batch_size=7,
    )  # fmt: skip
    assert type(held.seed) is int
    assert type(held.tol) is float


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("seed", "three", "`seed` 'three' is not a whole number"),
        ("seed", 1.5, "`seed` 1.5 is not a whole number"),
        ("seed", -1, "`seed` is -1; it must be at least 0"),
        ("tol", "0.1", "`tol` '0.1' is not a number"),
        ("tol", 0, "`tol` is 0.0; it must be above 0 and at most 1"),
        ("tol", float("nan"), "`tol` is nan; it must be above 0 and at most 1"),
        ("target_variance", float("inf"), "`target_variance` is inf; it must be above 0 and finite"),
        ("recurrent", "no", "`recurrent` 'no' is not True or False"),
        ("bias", "none", "`bias` 'none' is not one of zero, keep, center"),
        ("exclude", 3, "`exclude` 3 is not a pattern or a list of patterns"),
        ("mean", "a,b", "`mean` 'a,b' is not a list of numbers such as 0.485,0.456,0.406"),
        ("batch_size", "some", "`batch_size` 'some' is not a positive number or all"),
        ("batch_size", 0, "`batch_size` 0 is not a positive number or all"),
        ("limit", 0, "`limit` is 0; it must be above 0"),
        ("memory", "much", "`memory` 'much' is not a size such as 500M or 8G"),
        ("device", 0, "`device` 0 is not a string"),
        ("size", 10**6, "`size` is 1000000; it must be above 0 and at most 8192"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object, complaint: str):
    with pytest.raises(LsuvError) as caught:
        initialize(two_layers(), X, **{name: value})
    assert str(caught.value) == complaint


# Data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("calib.npy", X)
    Path("x=1").mkdir()
    np.save("x=1/calib.npy", X)
    return tmp_path


@pytest.mark.parametrize(
    "data",
    [
        "calib.npy", Path("calib.npy"), ["calib.npy"], [Path("calib.npy")], ("x=calib.npy",), {"x": "calib.npy"},
        {"x": Path("calib.npy")}, Path("x=1/calib.npy"), [Path("x=1/calib.npy")], "x=x=1/calib.npy", {"x": X},
        [[X, np.arange(64)]], [(X[:40], np.arange(40)), (X[40:], np.arange(24))],
    ],
    ids=repr,
)  # fmt: skip
def test_data_in_files_and_batches_with_labels_give_what_the_array_gives(folder, data):
    wanted = initialize(two_layers(), X).model
    found = initialize(two_layers(), data).model
    for name in "WV":
        np.testing.assert_allclose(tensor(found, name), tensor(wanted, name), rtol=1e-6)


def test_two_inputs_by_name_from_files_and_by_order_from_a_batch(folder):
    text = "g (float[N,4] x, float[N,2] z) => (float[N,4] y) { a = MatMul(x, W) b = MatMul(z, V) y = Add(a, b) }"
    proto = model(text, W=normal(4, 4), V=normal(2, 4))
    other = normal(64, 2, seed=9) * 3
    np.save("z.npy", other)
    for data in ({"x": "calib.npy", "z": Path("z.npy")}, ["z=z.npy", "x=calib.npy"], [(X, other, np.ones(64))]):
        done = initialize(proto, data).model
        outputs = values(done, {"x": X, "z": other}, layer_outputs(done))
        assert [value.var() for value in outputs.values()] == pytest.approx([1, 1], abs=1e-3)


def test_random_data_by_its_name():
    assert measure(two_layers(), "random").data == "random"
    with pytest.raises(LsuvError, match=r"dimension mismatch; input 'x' leaves axis 'K' open: 16 in random data"):
        measure(model("g (float[N,K] x) => (float[N,4] y) { y = MatMul(x, W) }", W=normal(4, 4)), "random")


@pytest.mark.parametrize("data", [["calib.npy", X], {"x": X, "z": "calib.npy"}], ids=["list", "dict"])
def test_files_and_arrays_do_not_mix(folder, data):
    with pytest.raises(LsuvError, match="`data` holds both paths and a ndarray; give files or arrays, not both"):
        measure(two_layers(), data)


def test_initializations_as_text(folder):
    reports = compare(two_layers(), "calib.npy", "lsuv, keep")
    assert list(reports) == ["lsuv", "keep"]
    assert [layer.variance for layer in reports["lsuv"].layers] == pytest.approx([1, 1], abs=1e-3)
    with pytest.raises(LsuvError, match=r"`inits` lsv: choose among lsuv, lsuv.center,"):
        compare(two_layers(), X, "lsv,keep")


# The tolerance


def test_measure_and_check_judge_alike(folder):
    """A layer 5% off its target is within the one default tolerance and outside of 0.01."""
    done = initialize(two_layers(), X, output="m.onnx", target_variance=1.05)
    assert {layer.status for layer in measure(done.model, X).layers} == {"ok"}
    assert {layer.status for layer in measure(done.model, X, tol=0.01).layers} == {"outside"}
    assert lsuv("check", "m.onnx", "--data", "calib.npy").code == 0
    assert lsuv("check", "m.onnx", "--data", "calib.npy", "--tol", "0.01").code == 1


# Messages


@pytest.mark.parametrize(
    ("settings", "options", "argument", "option"),
    [
        ({"tol": 2}, "--tol 2", "`tol` is 2", "--tol is 2"),
        ({"batch_size": 3}, "--batch-size 3", "leave out `batch_size=3`", "leave out --batch-size 3"),
        ({"exclude": "q*"}, "--exclude q*", "`exclude` 'q*' matches no layer", "--exclude 'q*' matches no layer"),
        ({"device": "tpu"}, "--device tpu", "`device` 'tpu' is not", "--device 'tpu' is not"),
        ({"output": "calib.npy"}, "-o calib.npy", "another `output`", "another --output"),
        ({"weights": "w.pt"}, "--weights w.pt", "`weights` w.pt must", "--weights w.pt must"),
    ],
)
def test_an_error_speaks_of_arguments_in_python_and_of_options_in_the_command(
    folder, settings: dict[str, Any], options: str, argument: str, option: str
):
    proto = model("g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, W) }", W=normal(4, 4))
    onnx.save(proto, "m.onnx")
    with pytest.raises(LsuvError) as caught:
        initialize(proto, X, **settings)
    assert argument in str(caught.value)
    assert "--" not in str(caught.value)
    done = lsuv("init", "m.onnx", "--data", "calib.npy", *options.split())
    assert done.code == 2
    assert option in done.err
    assert "`" not in done.err


def test_warnings_and_notes_speak_of_them_too(folder):
    text = "g (float[N,4] x) => (float[N,4] y) { a = MatMul(x, W) b = Relu(a) c = MatMul(b, W) y = MatMul(c, V) }"
    onnx.save(model(text, W=normal(4, 4), V=normal(4, 4)), "m.onnx")
    report = initialize("m.onnx", X, exclude="y").report
    assert any("`tied='untie'` gives each layer its own" in warning for warning in report.warnings)
    assert report.layers[-1].notes == ("`exclude='y'`",)
    shown = lsuv("init", "m.onnx", "--data", "calib.npy", "--exclude", "y", "-v", "--json")
    assert "--tied untie gives each layer its own" in shown.err
    assert '"--exclude y"' in shown.out
    assert "`" not in shown.err + shown.out


def test_arguments_become_options():
    assert as_typed("leave out `limit=3`") == "leave out --limit 3"
    assert as_typed('with `batch_size="all"`, `batch_size`') == "with --batch-size all, --batch-size"
    assert as_typed("`force=True`, `rescale=False`") == "--force, --no-rescale"
    assert as_typed("`exclude='a b*'` and `device=cuda:1`") == "--exclude a b* and --device cuda:1"
    assert as_typed("node `Conv_3` has `axis=1`") == "node `Conv_3` has `axis=1`"


def test_every_option_that_a_message_can_name_exists():
    commands = ("init", "inspect", "compare", "strip")
    known = set(re.findall(r"--[a-z][\w-]*", "".join(lsuv(name, "--help").out for name in commands)))
    keywords = get_type_hints(InitializeKeywords).keys()
    for name in ARGUMENTS:
        assert as_typed(f"`{name}`") in known
        functions = [*FUNCTIONS, *WITHOUT_SETTINGS]
        assert name in {*keywords, *(name for f in functions for name in inspect.signature(f).parameters)}


def texts(path: Path) -> list[str]:
    """The strings in a module that are not documentation."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


FOREIGN = ("--id=", "--query-gpu=", "--format=")  # options of nvidia-smi

MODULES = sorted(path for path in (ROOT / "lsuv_cli").rglob("*.py") if "cli" not in path.parts[-2:-1])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_outside_the_command_speaks_of_options(path: Path):
    functions = {"api.py": {"measure", "compare", "initialize"}, "__init__.py": {"dynamo"}}  # and lsuv_'s own argument
    known = {*ARGUMENTS, *functions.get(path.name, ())}
    for text in texts(path):
        if text.startswith(FOREIGN):
            continue
        assert not re.search(r"(?<![\w-])--?[a-z][\w-]*", text), text
        for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text):
            assert name in known, text


# Too little memory is told as such


@pytest.fixture
def no_memory(monkeypatch):
    def place(owner: Any, name: str) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError("Unable to allocate 10.0 GiB")

        monkeypatch.setattr(owner, name, fail)

    return place


def test_too_little_memory_is_no_fault_of_the_model(no_memory):
    """A constant that cannot be folded for lack of memory, and shapes that cannot be inferred."""
    no_memory(onnx.reference.ReferenceEvaluator, "run")
    text = "g (float[N,4] x) => (float[N,4] y) { v = Transpose(u) w = Mul(v, u) y = MatMul(x, w) }"
    with pytest.raises(MemoryError):
        initialize(model(text, u=normal(4, 4)), X)


@pytest.mark.parametrize("function", [measure, initialize])
def test_shapes_that_cannot_be_inferred_for_lack_of_memory(no_memory, function):
    no_memory(onnx.shape_inference, "infer_shapes")
    with pytest.raises(MemoryError):
        function(two_layers(), X)


def test_too_little_memory_is_no_fault_of_the_data(no_memory, tmp_path):
    np.savez(tmp_path / "x.npz", x=X)
    no_memory(np.lib.format, "read_array")
    no_memory(np, "frombuffer")
    with pytest.raises(MemoryError):
        measure(two_layers(), str(tmp_path / "x.npz"))


def test_measuring_needs_data():
    for function in (measure, compare):
        with pytest.raises(LsuvError, match=r"needs data: give `data`"):
            function(two_layers(), None)


def test_initializations_that_are_no_names():
    for inits in (5, [5], None):
        with pytest.raises(LsuvError, match=r"`inits` .*: choose among lsuv"):
            compare(two_layers(), X, inits)
