"""Files in and out: external data, atomic writes, nothing lost."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lsuv_cli
from helpers import model, normal
from independent import layer_variances, stored
from lsuv_cli import outputs
from lsuv_cli.errors import LsuvError, OutputError
from lsuv_cli.model import graph as graphs
from lsuv_cli.model import layers
from lsuv_cli.model.draft import Draft, _Weights, earlier_metadata
from lsuv_cli.model.file import load
from lsuv_cli.model.places import Held, Range
from lsuv_cli.outputs import Target
from lsuv_cli.spool import Spool

rng = np.random.default_rng(11)
X = rng.standard_normal((64, 32)).astype(np.float32)


def chain(layers: int = 3) -> onnx.ModelProto:
    text = " ".join(f"a{k} = MatMul(r{k}, w{k}) r{k + 1} = Relu(a{k})" for k in range(layers))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[N,32] x) => (float[N,32] y)'
        f" {{ r0 = Identity(x) {text} s = Add(r{layers}, table) y = Identity(s) }}"
    )
    for k in range(layers):
        array = rng.standard_normal((32, 32)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{k}"))
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((1, 32)).astype(np.float32), "table"))
    return model


def target(path: Path) -> Target:
    return outputs.check({"-o": path}, ())["-o"]


def scattered(folder: Path, model: onnx.ModelProto) -> Path:
    """Save with external data in several files, at odd offsets, some in a subdirectory."""
    (folder / "sub").mkdir()
    for k, tensor in enumerate(model.graph.initializer):
        name = ["a.bin", "sub/b.bin"][k % 2]
        with (folder / name).open("ab") as file:
            file.write(b"!" * (k * 7 + 3))
            offset = file.tell()
            file.write(tensor.raw_data)
        length = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_comes_out_as_one_file_beside_the_output(tmp_path):
    embedded = chain()
    model = scattered(tmp_path, onnx.ModelProto.FromString(embedded.SerializeToString()))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    out = tmp_path / "out" / "o.onnx"
    out.parent.mkdir()
    report = lsuv_cli.initialize(model, X, output=out).report
    assert sorted(path.name for path in out.parent.iterdir()) == ["o.onnx", "o.onnx.data"]
    written = onnx.load(out)
    assert all(abs(variance - 1) < 1e-3 for variance in layer_variances(written, {"x": X}).values())
    np.testing.assert_array_equal(stored(written)["table"], stored(embedded)["table"])
    assert {path: path.read_bytes() for path in before} == before
    assert len(report.layers) == 3
    # The same weights as from the same model without external data.
    plain = stored(lsuv_cli.initialize(embedded, X).model)
    assert all(np.array_equal(plain[name], array) for name, array in stored(written).items())


def test_only_the_place_of_external_data_changes(tmp_path):
    model = scattered(tmp_path, chain())
    lsuv_cli.initialize(model, X, output=tmp_path / "o.onnx")
    before, after = (onnx.load(tmp_path / name, load_external_data=False) for name in ("m.onnx", "o.onnx"))
    for old, new in zip(before.graph.initializer, after.graph.initializer, strict=True):
        assert {e.value for e in new.external_data if e.key == "location"} == {"o.onnx.data"}
        new.CopyFrom(old)
    kept = [p for p in after.metadata_props if not p.key.startswith("lsuv.")]
    del after.metadata_props[:]
    after.metadata_props.extend(kept)
    assert after.SerializeToString() == before.SerializeToString()


def test_a_small_model_stays_embedded(tmp_path):
    lsuv_cli.initialize(chain(), X, output=tmp_path / "o.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["o.onnx"]


def test_external_data_is_embedded_when_the_model_is_kept_in_memory(tmp_path):
    model = scattered(tmp_path, chain())
    done = lsuv_cli.initialize(model, X)
    assert done.model is not None
    assert all(abs(variance - 1) < 1e-3 for variance in layer_variances(done.model, {"x": X}).values())


def test_a_large_model_is_verified_in_pieces_with_the_same_result(tmp_path, monkeypatch):
    model = scattered(tmp_path, chain(5))
    lsuv_cli.initialize(model, X, output=tmp_path / "whole.onnx")
    monkeypatch.setattr("lsuv_cli.scaling.verification.VERIFY_BYTES", 5000)
    monkeypatch.setattr("lsuv_cli.scaling.stages.STAGE_BYTES", 5000)
    report = lsuv_cli.initialize(model, X, output=tmp_path / "pieces.onnx").report
    assert report.stages == 5
    assert [layer.status for layer in report.layers] == ["ok"] * 5
    whole, pieces = (stored(onnx.load(tmp_path / f"{name}.onnx")) for name in ("whole", "pieces"))
    for name in whole:
        np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-5, atol=1e-6)


WRONG_PLACES = {
    "missing": ({"location": "none.bin"}, "cannot be read"),
    "parent": ({"location": "../a.bin"}, "outside"),
    "absolute": ({"location": "/etc/passwd"}, "outside"),
    "beyond the end": ({"offset": "4"}, "ends at byte"),
    "negative": ({"offset": "-8"}, "ends at byte"),
    "not a number": ({"offset": "first"}, "no number"),
    "wrong length": ({"length": "12"}, "its shape wants"),
    "no file": ({"location": ""}, "names no file"),
    "a directory": ({"location": "sub"}, "not a file"),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_external_data_in_a_wrong_place_is_refused(tmp_path, name):
    changed, expected = WRONG_PLACES[name]
    scattered(tmp_path, chain(1))
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    size = (tmp_path / "a.bin").stat().st_size
    entries = {e.key: e for e in model.graph.initializer[0].external_data}
    for key, value in changed.items():
        entries[key].value = str(size - 4) if value == "4" else value
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(LsuvError, match=expected):
        lsuv_cli.initialize(tmp_path / "m.onnx", X, output=tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_external_data_behind_a_link_is_refused_with_advice(tmp_path, link):
    scattered(tmp_path, chain(1))
    (tmp_path / "a.bin").rename(tmp_path / "elsewhere")
    link(tmp_path / "elsewhere", tmp_path / "a.bin")
    with pytest.raises(LsuvError, match="cp"):
        lsuv_cli.initialize(tmp_path / "m.onnx", X)


@pytest.mark.parametrize("other", ["m.onnx", "link.onnx", "hard.onnx", "sub/../m.onnx"])
def test_the_input_is_never_the_output_under_any_name(tmp_path, other):
    model = scattered(tmp_path, chain(1))
    if other == "link.onnx":
        (tmp_path / other).symlink_to(model)
    if other == "hard.onnx":
        os.link(model, tmp_path / other)
    with pytest.raises(OutputError, match="input itself"):
        lsuv_cli.initialize(model, X, output=tmp_path / other, force=True)


def test_the_inputs_data_file_is_never_the_outputs(tmp_path):
    model = chain(1)
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="o.onnx.data", size_threshold=0)
    with pytest.raises(OutputError, match="input itself"):
        lsuv_cli.initialize(tmp_path / "m.onnx", X, output=tmp_path / "o.onnx", force=True)


def test_a_failure_leaves_neither_output_nor_scratch(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lsuv_cli.model.draft.os.fsync", fails)
    with pytest.raises(OutputError, match="No space left"):
        lsuv_cli.initialize(chain(1), X, output=tmp_path / "o.onnx")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_and_what_a_living_run_holds_is_not(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert dead.returncode == -9, dead.stderr
    assert len(list(tmp_path.glob(".lsuv-*"))) == 1
    with Draft(load(chain(1)), target(tmp_path / "living.onnx")):
        (living,) = tmp_path.glob(".lsuv-*")
        lsuv_cli.initialize(chain(1), X, output=tmp_path / "o.onnx")
        assert [living] == list(tmp_path.glob(".lsuv-*"))
    assert [path.name for path in tmp_path.iterdir()] == ["o.onnx"]


_DIES = """
import os, signal, sys
from pathlib import Path
import onnx
from lsuv_cli.model.draft import Draft, earlier_metadata
from lsuv_cli.model.file import ModelFile
from lsuv_cli.outputs import check
model = onnx.helper.make_model(onnx.GraphProto(name="g"))
with Draft(ModelFile(model, None, "m"), check({"-o": Path(sys.argv[1]) / "o.onnx"}, ())["-o"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_weight_in_a_constant_node_and_as_value_floats(tmp_path):
    model = chain(1)
    weight = numpy_helper.to_array(model.graph.initializer[0])
    del model.graph.initializer[0]
    model.graph.node.insert(
        0, helper.make_node("Constant", [], ["w0"], value=numpy_helper.from_array(weight, "anything"))
    )
    lsuv_cli.initialize(model, X, output=tmp_path / "o.onnx")
    written = onnx.load(tmp_path / "o.onnx")
    held = numpy_helper.to_array(written.graph.node[0].attribute[0].t)
    assert abs(np.var(X.astype(np.float64) @ held) - 1) < 1e-3


def test_external_data_without_an_offset_begins_at_the_start_of_its_file(tmp_path):
    weight = normal(8, 4)
    (tmp_path / "w.bin").write_bytes(weight.tobytes() + b"more")
    proto = model("g (float[N,8] x) => (y) { y = MatMul(x, w) }")
    held = proto.graph.initializer.add(name="w", data_type=onnx.TensorProto.FLOAT, dims=[8, 4])
    held.data_location = onnx.TensorProto.EXTERNAL
    held.external_data.add(key="location", value="w.bin")
    onnx.save(proto, tmp_path / "m.onnx")
    file = load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(file.array(file.proto.graph.initializer[0]), weight)


# What is added to a draft


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("size", [4, 300, 5000])
def test_a_new_tensor_is_in_the_file_wherever_it_waited(external, size, tmp_path):
    """Of up to 1 KiB in the model, above that in the data file if there is one, above 16 KiB parked if not."""
    given = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))
    onnx.save(given, tmp_path / "m.onnx", save_as_external_data=external, size_threshold=0, location="m.bin")
    with Draft(load(tmp_path / "m.onnx"), target(tmp_path / "o.onnx")) as draft:
        draft.append(draft.file.proto.graph, "new", normal(size))
        draft.append(draft.file.proto.graph, "number", np.array(2, np.float32))
        draft.store(draft.file.proto.graph.initializer[0], 2 * normal(4, 4))
        draft.finish({"key": "value"})
        draft.publish()
    held = {t.name: t for t in onnx.load(tmp_path / "o.onnx", load_external_data=False).graph.initializer}
    assert (held["new"].data_location == TensorProto.EXTERNAL) == (external and size > 256)
    made = onnx.load(tmp_path / "o.onnx")
    found = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    np.testing.assert_array_equal(found["new"], normal(size))
    np.testing.assert_array_equal(found["w"], 2 * normal(4, 4))
    assert found["number"].shape == ()
    assert [(p.key, p.value) for p in made.metadata_props] == [("lsuv.key", "value")]
    assert sorted(path.name for path in tmp_path.glob("o*")) == ["o.onnx", *["o.onnx.data"] * external]


def test_the_entries_of_an_earlier_run_and_those_of_others():
    given = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))
    for key in ("lsuv.seed", "author", "lsuv.data"):
        given.metadata_props.add(key=key, value=f"of {key}")
    with Draft(load(given), None) as draft:
        assert earlier_metadata(draft.file.proto) == {"seed": "of lsuv.seed", "data": "of lsuv.data"}
        made = draft.finish({"seed": "3"}).proto
    assert [(p.key, p.value) for p in made.metadata_props] == [("author", "of author"), ("lsuv.seed", "3")]


@pytest.mark.parametrize("ir", [3, 4])
def test_before_ir_4_an_initializer_is_an_input_too(ir):
    given = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", ir=ir, w=normal(4, 4))
    with Draft(load(given), None) as draft:
        draft.append(draft.file.proto.graph, "new", normal(3))
        names = [i.name for i in draft.finish({}).proto.graph.input]
    assert names == (["x", "w", "new"] if ir == 3 else ["x"])


def test_a_tensor_that_is_stored_again_takes_its_old_place(tmp_path):
    given = model("g (float[N,80] x) => (y) { y = MatMul(x, w) }", w=normal(80, 80))
    (tmp_path / "m.onnx").write_bytes(given.SerializeToString())
    with Draft(load(tmp_path / "m.onnx"), target(tmp_path / "o.onnx")) as draft:
        (held,) = draft.file.proto.graph.initializer
        for factor in (2, 3):
            draft.store(held, factor * normal(80, 80))
            np.testing.assert_array_equal(draft.array(held), factor * normal(80, 80))
        (waiting,) = next(tmp_path.glob(".lsuv-*")).glob("*.waiting")
        assert waiting.stat().st_size == 80 * 80 * 4
        draft.finish({})
        draft.publish()
    np.testing.assert_array_equal(
        numpy_helper.to_array(onnx.load(tmp_path / "o.onnx").graph.initializer[0]), 3 * normal(80, 80)
    )


def two_weights() -> onnx.ModelProto:
    return model("g (float[N,80] x) => (y) { a = MatMul(x, v) y = MatMul(a, w) }", v=normal(80, 80), w=normal(80, 80))


@pytest.mark.parametrize(("room", "kinds"), [(1 << 40, [Held, Range]), (100, [Held, Held])])
def test_new_weights_that_are_many_wait_in_a_temporary_file_if_there_is_room(room, kinds, monkeypatch):
    monkeypatch.setattr("lsuv_cli.model.draft.IN_MEMORY", 80 * 80 * 4)
    monkeypatch.setattr("lsuv_cli.model.draft.room", lambda: room)
    with Draft(load(two_weights()), None) as draft:
        for factor, held in enumerate(draft.file.proto.graph.initializer, start=2):
            draft.store(held, factor * normal(80, 80))
        made = draft.finish({})
        assert [type(place) for place in made.parked.values()] == kinds
        first, second = (numpy_helper.to_array(held) for held in made.embedded().graph.initializer)
    np.testing.assert_array_equal(first, 2 * normal(80, 80))
    np.testing.assert_array_equal(second, 3 * normal(80, 80))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize(("spooled", "told"), [(False, "o.onnx"), (True, "the temporary file /dev/full")])
def test_a_full_disk_is_told_with_the_name_of_the_output_or_of_the_temporary_file(tmp_path, spooled, told):
    weights = _Weights(Path("/dev/full"), target(tmp_path / "o.onnx"), Spool("weights") if spooled else None)
    with pytest.raises(OutputError, match=told):
        weights.write([bytes(1 << 20)], 1 << 20)
    weights.write([b"few"], 3)
    with pytest.raises(OutputError, match=told):
        weights.flush()
    with contextlib.suppress(OSError):
        weights.file.close()


@pytest.mark.parametrize(
    ("raised", "seen"), [(OSError(28, "No space left"), OutputError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_draft_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch, raised, seen):
    def fails(*given):
        raise raised

    monkeypatch.setattr("lsuv_cli.model.draft._Weights", fails)
    with pytest.raises(seen), Draft(load(chain(1)), target(tmp_path / "o.onnx")):
        pass
    assert not list(tmp_path.iterdir())


def test_a_published_model_is_read_from_its_new_place(tmp_path):
    with Draft(load(two_weights()), target(tmp_path / "o.onnx")) as draft:
        draft.finish({})
        draft.publish()
    assert draft.result is not None
    assert draft.result.path == tmp_path / "o.onnx"
    np.testing.assert_array_equal(draft.result.array(draft.result.proto.graph.initializer[0]), normal(80, 80))


def test_tensors_in_a_data_file_begin_at_pages_so_that_they_can_be_mapped(tmp_path):
    onnx.save(two_weights(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    with Draft(load(tmp_path / "m.onnx"), target(tmp_path / "o.onnx")) as draft:
        draft.finish({})
        draft.publish()
    held = onnx.load(tmp_path / "o.onnx", load_external_data=False).graph.initializer
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in held]
    assert [int(place["offset"]) % 4096 for place in places] == [0, 0]
    assert int(places[1]["offset"]) == 28672  # the first page behind 80·80·4 bytes


def test_a_draft_in_memory_reads_what_is_still_in_the_inputs_files(tmp_path):
    given = two_weights()
    expected = {"v": normal(80, 80), "w": normal(80, 80), "small": normal(3)}
    given.graph.initializer.append(numpy_helper.from_array(normal(3), "small"))
    onnx.save(given, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=100, location="m.bin")
    with Draft(load(tmp_path / "m.onnx"), None) as draft:
        now = draft.in_memory()
        for tensor in now.proto.graph.initializer:
            np.testing.assert_array_equal(now.array(tensor), expected[tensor.name])


def test_a_large_tensor_of_a_branch_is_in_the_model_itself():
    """Only tensors of the main graph are parked: others stand inside of nodes, which run as they are."""
    given = model("""g (float[N,4] x, bool c) => (float[N,4] y) {
        y = If(c) <then_branch = t () => (float[N,4] o) { o = Neg(x) },
                   else_branch = e () => (float[N,4] o) { o = Abs(x) }> }""")
    with Draft(load(given), None) as draft:
        branch = draft.file.proto.graph.node[0].attribute[0].g
        draft.append(branch, "new", normal(5000))
        (held,) = draft.finish({}).embedded().graph.node[0].attribute[0].g.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(held), normal(5000))


def test_what_was_stored_can_be_read_at_once_however_small(tmp_path):
    given = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))
    onnx.save(given, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    with Draft(load(tmp_path / "m.onnx"), target(tmp_path / "o.onnx")) as draft:
        (held,) = draft.file.proto.graph.initializer
        np.testing.assert_array_equal(draft.array(held), normal(4, 4))
        draft.store(held, 3 * normal(4, 4))
        np.testing.assert_array_equal(draft.array(held), 3 * normal(4, 4))
        assert layers.find(graphs.build(draft.file.proto, draft)).layers[0].weight.place == "external"


def test_before_ir_4_a_branch_gets_a_constant_in_front_of_its_nodes():
    given = model("""g (float[N,4] x, bool c) => (float[N,4] y) {
        y = If(c) <then_branch = t () => (float[N,4] o) { o = Neg(x) },
                   else_branch = e () => (float[N,4] o) { o = Abs(x) }> }""", ir=3)  # fmt: skip
    with Draft(load(given), None) as draft:
        branch = draft.file.proto.graph.node[0].attribute[0].g
        draft.append(branch, "new", normal(3))
        assert [node.op_type for node in branch.node] == ["Constant", "Neg"]
        assert not branch.initializer
