"""inspect, check and compare: what they print, what they measure, and how they exit."""

import csv
import io
import json
import math

import numpy as np
import onnx
import pytest

from helpers import model, normal, values
from independent import layer_variances, stored
from lsuv_cli import compare, inspect, measure
from shell import MAXOUT, RELU, lsuv

DATA = RELU.with_suffix(".npy")


@pytest.fixture
def shared(tmp_path):
    """Two layers with one weight, a grouped convolution, a Constant node and a half-precision branch."""
    proto = model(
        """g (float[N,4,6,6] x) => (float[N,6] y, float[N,3] z, float16[N,4] w) {
            c = Conv<group=2, pads=[1,1,1,1]>(x, K)
            r = Relu(c)
            p = GlobalAveragePool(r)
            f = Flatten(p)
            a = MatMul(f, V)
            b = Tanh(a)
            y = MatMul(b, V)
            U = Constant<value: tensor = float[6,3] {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,1}>()
            z = MatMul(y, U)
            h = Cast<to=10>(f)
            w = MatMul(h, H)
        }""",
        K=normal(6, 2, 3, 3),
        V=normal(6, 6, seed=1),
        H=normal(6, 4, seed=2, dtype=np.float16),
    )
    onnx.save(proto, tmp_path / "m.onnx")
    np.save(tmp_path / "d.npy", normal(16, 4, 6, 6, seed=3))
    return tmp_path


def test_inspect_shows_what_there_is_without_data():
    done = lsuv("inspect", RELU)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["layer", "op", "weight", "stage", "type", "in", "std", "w"]
    assert lines[1].split() == ["conv11", "Conv", "16x3x3x3", "1", "f32", "init", "0.0092"]
    assert "11 layers found" in lines[-1]


def test_inspect_tells_groups_types_places_and_sharing(shared):
    done = lsuv("inspect", shared / "m.onnx", "--data", shared / "d.npy")
    rows = {line.split()[0]: line.split() for line in done.out.splitlines()}
    assert rows["c"][1:7] == ["Conv", "6x2x3x3", "1", "2", "f32", "init"]
    assert rows["w"][1:6] == ["MatMul", "6x4", rows["w"][3], "f16", "init"]
    assert "init*" in rows["a"]
    assert "init*" in rows["y"]
    assert "const" in rows["z"]
    assert "* shared by several layers" in done.out
    report = inspect(str(shared / "m.onnx"), np.load(shared / "d.npy"))
    found = {layer.name: layer for layer in report.layers}
    assert [found[k].shared for k in "cayz"] == [False, True, True, False]
    assert (found["c"].groups, found["c"].dtype, found["c"].place) == (2, "float32", "initializer")
    assert (found["w"].dtype, found["z"].place) == ("float16", "constant")


def test_inspect_says_what_is_skipped_and_why():
    proto = model(
        "g (float[N,4] x, float[4,3] v) => (float[N,3] y, float[N,2] z) "
        "{ y = MatMul(x, v) h = Relu(y) z = MatMul(h, W) }",
        W=normal(3, 2),
    )
    weightless = model("g (float[N,4,5,5] x, float[2,4,3,3] w) => (float[N,2,3,3] y) { y = Conv(x, w) }")
    assert [layer.status for layer in inspect(proto).layers] == ["planned"]
    (only,) = inspect(weightless).layers
    assert (only.status, only.notes) == ("skipped", ("its weight is computed from the input",))


def test_the_numbers_are_those_of_an_independent_measurement():
    data = np.load(DATA)
    proto = onnx.load(RELU)
    expected = layer_variances(proto, {"data": data})
    weights = stored(proto)
    report = json.loads(lsuv("inspect", RELU, "--data", DATA, "--json").out)
    assert [layer["name"] for layer in report["layers"]] == list(expected)
    for layer in report["layers"]:
        assert layer["variance"] == pytest.approx(expected[layer["name"]], rel=1e-4)
        assert layer["weight_std"] == pytest.approx(float(weights[layer["weight"]].std()), rel=1e-5)
    first = proto.graph.node[0].output[0]
    outputs = values(proto, {"data": data}, [first])
    assert report["layers"][0]["mean"] == pytest.approx(outputs[first].mean(), rel=1e-3)


@pytest.mark.parametrize("batch_size", [None, 3, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_dead_units_are_those_that_are_never_above_zero(dtype, batch_size):
    kind = {np.float32: "float", np.float16: "float16", np.float64: "double"}[dtype]
    proto = model(
        f"""g ({kind}[N,2,5,5] x) => ({kind}[N,6] y, {kind}[6,N] t) {{
            c = Conv(x, K, cb)
            r = Relu(c)
            p = GlobalMaxPool(r)
            f = Flatten(p)
            a = MatMul(f, V)
            b = Add(a, vb)
            g = Relu(b)
            y = Gemm(g, U)
            q = Transpose(f)
            t = MatMul(T, q)
            u = Relu(t)
        }}""",
        K=normal(4, 2, 3, 3, dtype=dtype),
        cb=np.array([0, -1000, 0, 0], dtype),
        V=normal(4, 5, seed=1, dtype=dtype),
        vb=np.array([-999, -30, -999, 20, 0], dtype),
        U=normal(5, 6, seed=2, dtype=dtype),
        T=-np.abs(normal(6, 4, seed=4, dtype=dtype)) * np.array([[1], [-1], [1], [1], [1], [1]], dtype),
    )
    data = normal(7, 2, 5, 5, seed=3, dtype=dtype)
    found = {layer.name: layer.dead for layer in inspect(proto, data, batch_size=batch_size).layers}
    outputs = values(proto, {"x": data}, ["c", "b", "t"], reference=True)
    assert found["c"] == np.mean(outputs["c"].max((0, 2, 3)) <= 0) == 0.25
    assert found["a"] == np.mean(outputs["b"].max(0) <= 0)
    assert 0.4 <= found["a"] <= 0.8
    assert found["y"] is None  # no Relu reads it
    assert found["t"] == np.mean(outputs["t"].max(1) <= 0) == 5 / 6


def test_units_of_a_sequence_are_its_features():
    proto = model(
        "g (float[N,T,3] x) => (float[N,T,4] y) { a = MatMul(x, W) b = Add(a, c) y = Relu(b) }",
        W=normal(3, 4),
        c=np.array([0, -100, 0, -100], np.float32),
    )
    (layer,) = inspect(proto, normal(5, 6, 3)).layers
    assert layer.dead == 0.5


def test_dead_units_are_counted_for_inspect_only():
    assert measure(str(RELU), np.load(DATA)).layers[0].dead is None


def test_inspect_as_csv():
    done = lsuv("inspect", RELU, "--data", DATA, "--csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    report = json.loads(lsuv("inspect", RELU, "--data", DATA, "--json").out)
    assert len(rows) == 11
    assert rows[0]["shape"] == "16x3x3x3"
    assert [float(row["variance"]) for row in rows] == [layer["variance"] for layer in report["layers"]]
    assert set(rows[0]) == set(report["layers"][0])


def test_inspect_reads_a_model_from_stdin_like_any_other():
    import subprocess

    from shell import LSUV

    done = subprocess.run([*LSUV, "inspect", "-"], input=MAXOUT.read_bytes(), capture_output=True, check=True)
    assert b"7 layers found" in done.stdout


@pytest.fixture(scope="module")
def initialized(tmp_path_factory):
    target = tmp_path_factory.mktemp("check") / "m.onnx"
    assert lsuv("init", RELU, "--data", DATA, "-o", target, "-q").code == 0
    return target


def test_check_passes_a_good_model(initialized):
    done = lsuv("check", initialized, "--data", DATA)
    assert done.code == 0
    assert done.out.startswith("11 layers within tolerance (32 samples; CPU")
    assert done.err == ""


def test_check_fails_a_bad_model_and_names_the_worst_layers_first():
    done = lsuv("check", RELU, "--data", DATA)
    assert done.code == 1
    expected = layer_variances(onnx.load(RELU), {"data": np.load(DATA)})
    worst = sorted(expected, key=lambda name: abs(math.log(expected[name])), reverse=True)[:5]
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == worst
    assert lines[6] == "and 6 more; -v shows all"
    assert lines[7].startswith("0 of 11 layers within tolerance, 11 outside")


def test_check_takes_a_tolerance_and_a_target(initialized):
    assert lsuv("check", initialized, "--data", DATA, "--tol", "1e-9", "-q").code == 1
    assert lsuv("check", initialized, "--data", DATA, "--target-variance", "2", "-q").code == 1
    assert lsuv("check", initialized, "--data", DATA, "--target-variance", "1.05", "-q").code == 0
    assert lsuv("check", RELU, "--data", DATA, "--tol", "1", "-q").code == 0  # everything below twice the target


def test_check_judges_only_what_is_asked_for(initialized, tmp_path):
    options = ("--pre-init", "keep", "--include", "ip2", "--target-variance", "4", "-q")
    mixed = lsuv("init", initialized, "--data", DATA, *options, "-o", tmp_path / "m.onnx")
    assert mixed.code == 0
    failed = lsuv("check", tmp_path / "m.onnx", "--data", DATA)
    assert failed.code == 1
    assert failed.out.splitlines()[1].split()[0] == "ip2"
    assert lsuv("check", tmp_path / "m.onnx", "--data", DATA, "--exclude", "ip2").code == 0


def test_check_quietly_and_in_json_and_at_length(initialized):
    quiet = lsuv("check", RELU, "--data", DATA, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (1, "", "")
    report = json.loads(lsuv("check", RELU, "--data", DATA, "--json").out)
    assert (report["command"], report["exit_code"]) == ("measure", 1)
    assert {layer["status"] for layer in report["layers"]} == {"outside"}
    shown = lsuv("check", initialized, "--data", DATA, "-v", "--device", "cpu").out.splitlines()
    assert len(shown) == 14  # a head, eleven layers, a verdict, the device
    assert shown[-1].endswith("(as asked)")


def test_compare_shows_the_papers_tables():
    done = lsuv("compare", RELU, "--data", DATA)
    assert done.code == 0
    text = done.out
    assert text.index("standard deviation of the weight") < text.index("variance of the output")
    header = "layer   op    weight       lsuv  orthonormal  xavier    msra    keep"
    assert text.splitlines()[1].split() == header.split()
    assert sum(line.startswith("conv33") for line in text.splitlines()) == 2


def test_compare_measures_what_each_initialization_gives(tmp_path):
    reports = json.loads(lsuv("compare", RELU, "--data", DATA, "--inits", "lsuv,msra,keep", "--json").out)
    assert reports["schema"] == "lsuv-comparison/1"
    assert list(reports["inits"]) == ["lsuv", "msra", "keep"]
    data = {"data": np.load(DATA)}
    lsuv("init", RELU, "--data", DATA, "-o", tmp_path / "lsuv.onnx", "-q")
    lsuv("init", RELU, "--pre-init", "msra", "--no-rescale", "-o", tmp_path / "msra.onnx", "-q")
    for name, path in (("lsuv", tmp_path / "lsuv.onnx"), ("msra", tmp_path / "msra.onnx"), ("keep", RELU)):
        expected = layer_variances(onnx.load(path), data)
        for layer in reports["inits"][name]["layers"]:
            assert layer["variance"] == pytest.approx(expected[layer["name"]], rel=1e-3), (name, layer["name"])


def test_compare_writes_nothing_and_changes_nothing(tmp_path):
    proto = onnx.load(RELU)
    before = proto.SerializeToString()
    compare(proto, np.load(DATA), ["lsuv", "keep"])
    assert proto.SerializeToString() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["check", "compare"])
def test_there_is_no_measuring_without_data(command):
    done = lsuv(command, RELU)
    assert (done.code, done.err) == (2, f"lsuv: {command} needs data: give --data\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "inspect": "lsuv: Missing argument 'MODEL'; see lsuv inspect --help",
        "inspcet m.onnx": "lsuv: No such command 'inspcet'",
        f"inspect {RELU} --jsno": "lsuv: No such option: --jsno",
        f"inspect {RELU} --json --csv": "lsuv: --json and --csv both want standard output",
        f"inspect {RELU} --exclude conv99": "lsuv: --exclude 'conv99' matches no layer",
        f"inspect {RELU} --device gpu": "lsuv: --device",
        f"check {RELU} --data nowhere.npy": "lsuv: ",
        f"check {RELU} --data {DATA} --tol x": "lsuv: Invalid value for '--tol'",
        f"check {RELU} --data {DATA} --plot p.jpg": "lsuv: --plot p.jpg must end in one of .pdf, .png, .svg",
        f"check {RELU} --data {DATA} --mean a,b": "lsuv: --mean 'a,b' is not a list of numbers",
        f"compare {RELU} --data {DATA} --inits lsv": "lsuv: --inits lsv: choose among lsuv, lsuv+center,",
        f"compare {RELU} --data {DATA} --inits ,": "lsuv: --inits none: choose among",
        f"compare {RELU} --data {DATA} --seed -1": "lsuv: --seed is -1; it must be at least 0",
        f"compare {RELU} --data {DATA} --limit x": "lsuv: Invalid value for '--limit'",
    }.items(),
)
def test_a_typo_is_one_line(words, expected):
    done = lsuv(*words.split())
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(expected)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--exclude", "*"]])
def test_check_of_no_layer_at_all_is_no_pass(tmp_path, words):
    text = "y = Relu(x)" if not words else "y = MatMul(x, w)"
    onnx.save(model(f"g (float[N,4] x) => (y) {{ {text} }}", w=normal(4, 4)), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", normal(8, 4))
    done = lsuv("check", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "x.npy"), *words)
    assert done.code == 2
    assert "has no layer to judge" in done.err
