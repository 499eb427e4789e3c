"""A model's tensors as a file has them: how many bytes a shape takes, and values that do not fit their shape."""

import io
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import model, normal
from lsuv_cli.errors import ModelError
from lsuv_cli.model.file import byte_size, embed, is_elsewhere, load, tensors
from lsuv_cli.model.places import Range
from lsuv_cli.spool import Spool

SIZES = {
    "FLOAT": 60, "DOUBLE": 120, "FLOAT16": 30, "BFLOAT16": 30, "INT8": 15, "INT64": 120, "BOOL": 15, "COMPLEX64": 120,
    "FLOAT8E5M2": 15, "INT4": 8, "UINT4": 8, "FLOAT4E2M1": 8, "INT2": 4, "UINT2": 4, "FLOAT6E2M3": 12, "FLOAT6E3M2": 12,
}  # fmt: skip


@pytest.mark.parametrize("kind", SIZES)
def test_the_bytes_of_fifteen_values(kind):
    if not hasattr(TensorProto, kind):
        pytest.skip(f"this onnx has no {kind}")
    code = getattr(TensorProto, kind)
    assert byte_size(TensorProto(dims=[3, 5], data_type=code)) == SIZES[kind]
    assert byte_size(TensorProto(dims=[3, 0, 5], data_type=code)) == 0


def test_a_type_that_nobody_knows():
    with pytest.raises(ModelError, match="unknown type 99"):
        byte_size(TensorProto(name="t", dims=[3], data_type=99))


def tensor(kind, dims, **values):
    return TensorProto(name="t", data_type=getattr(TensorProto, kind), dims=dims, **values)


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        (tensor("FLOAT", [3], float_data=[1, 2, 3]), ""),
        (tensor("FLOAT", [], float_data=[1]), ""),
        (tensor("FLOAT", [0]), ""),
        (tensor("FLOAT", [3], raw_data=bytes(12)), ""),
        (tensor("COMPLEX64", [3], float_data=range(6)), ""),
        (tensor("INT4", [3], int32_data=[1, 2]), ""),  # two to a byte
        (tensor("INT4", [3], int32_data=[1, 2, 3]), ""),  # one for each, as some writers do
        (tensor("INT4", [3], raw_data=bytes(2)), ""),
        (tensor("INT4", [5], int32_data=[1, 2]), "has 2 values"),
        (tensor("FLOAT", [3], float_data=[1, 2]), "has 2 values"),
        (tensor("FLOAT", [1], float_data=[1, 2, 3, 4]), "has 4 values"),  # as many as it has bytes
        (tensor("COMPLEX64", [3], float_data=[1, 2, 3]), "has 3 values"),
        (tensor("FLOAT", [3], raw_data=bytes(11)), "has 11 bytes, its shape wants 12"),
        (tensor("FLOAT", [-1], float_data=[1]), "has the shape"),
        (tensor("FLOAT", [2, 0, -1]), "has the shape"),
    ],
)
def test_values_and_shapes(held, problem):
    proto = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))
    proto.graph.initializer.append(held)
    if not problem:
        assert len(load(proto).proto.graph.initializer) == 2
        return
    with pytest.raises(ModelError, match=f"tensor 't' {problem}"):
        load(proto)


# Values in other files


@pytest.fixture
def saved(tmp_path):
    """Saves a model whose weight of 64 bytes is in d.bin, 80 bytes long, with these entries; gives its path."""
    (tmp_path / "d.bin").write_bytes(bytes(8) + normal(4, 4).tobytes() + bytes(8))

    def save(**entries):
        proto = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))
        held = proto.graph.initializer[0]
        held.ClearField("raw_data")
        held.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            held.external_data.add(key=key, value=str(value))
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        return tmp_path / "m.onnx"

    return save


@pytest.mark.parametrize("entries", [{"offset": 8, "length": 64}, {"offset": 8}, {"offset": 8, "length": ""}])
def test_values_beside_the_model(saved, entries):
    path = saved(location="d.bin", **entries)
    file = load(path)
    np.testing.assert_array_equal(file.array(file.proto.graph.initializer[0]), normal(4, 4))
    assert file.has_external_data
    assert file.data_files == {path.parent / "d.bin"}
    assert not load(model("g (float[N] x) => (y) { y = Neg(x) }")).has_external_data


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"offset": 16}, ""),
        ({}, ""),
        ({"offset": 17}, "ends at byte 81 of .* which has 80; the file is incomplete"),
        ({"offset": -1}, "ends at byte 63"),
        ({"length": -64}, "ends at byte -64"),
        ({"length": 60}, "has 60 bytes, its shape wants 64"),
        ({"offset": "x"}, "is no number"),
        ({"length": "x"}, "is no number"),
        ({"location": ""}, "names no file"),
        ({"location": "a\0b"}, "names no file"),
        ({"location": "/d.bin"}, "lies outside the model's directory"),
        ({"location": "../d.bin"}, "lies outside the model's directory"),
        ({"location": "sub\\..\\d.bin"}, "lies outside the model's directory"),
        ({"location": "gone.bin"}, "cannot be read .*without_weights"),
        ({"location": "d.bin/x"}, "cannot be read .*keep it beside the model$"),
        ({"location": "folder"}, "is not a file"),
        ({"location": "link.bin"}, "is behind a symbolic link"),
        ({"location": "linked/d.bin"}, "is behind a symbolic link"),
        ({"location": "hard.bin"}, "is a hard link"),
    ],
)
def test_where_values_may_not_be(saved, tmp_path, entries, problem):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "d.bin").write_bytes(bytes(64))
    (tmp_path / "link.bin").symlink_to("d.bin")
    (tmp_path / "linked").symlink_to("folder")
    (tmp_path / "one.bin").write_bytes(bytes(64))
    (tmp_path / "hard.bin").hardlink_to(tmp_path / "one.bin")
    path = saved(**{"location": "d.bin", **entries})
    if not problem:
        assert load(path).has_external_data
        return
    with pytest.raises(ModelError, match=problem):
        load(path)


def test_a_stream_has_no_file_beside_it(saved):
    data = saved(location="d.bin", offset=8).read_bytes()
    with pytest.raises(ModelError, match="not as a stream"):
        load(data)
    (absent,) = load(data, without_weights=True).absent
    assert absent.name == "w"


@pytest.mark.parametrize(("location", "absent"), [("d.bin", 0), ("gone.bin", 1), ("sub/gone.bin", 1)])
def test_a_missing_file_may_be_made_up_for(saved, location, absent):
    assert len(load(saved(location=location, offset=8), without_weights=True).absent) == absent


def test_a_path_that_is_no_file(tmp_path):
    with pytest.raises(ModelError, match="is a directory; give an ONNX file"):
        load(tmp_path)
    with pytest.raises(ModelError, match="No such file"):
        load(tmp_path / "gone.onnx")
    with pytest.raises(ModelError):
        load("a\0b")


def test_a_tensor_put_into_a_file(tmp_path):
    """As onnx itself reads it."""
    (tmp_path / "made.bin").write_bytes(bytes(4) + normal(4, 4).tobytes())
    file = load(model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=np.zeros((4, 4), "f")))
    (held,) = file.proto.graph.initializer
    file.put(held, Range(tmp_path / "made.bin", 4, 64))
    assert not file.data_files  # a file that was made up is none that the model came with
    np.testing.assert_array_equal(file.array(held), normal(4, 4))
    np.testing.assert_array_equal(numpy_helper.to_array(held, str(tmp_path)), normal(4, 4))


@pytest.mark.parametrize("values", ["float_data", "raw_data"])
def test_a_tensor_put_into_a_file_has_its_values_there_alone(tmp_path, values):
    proto = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=np.ones((4, 4), "f"))
    (held,) = proto.graph.initializer
    if values == "float_data":
        held.CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.ones(16)))
    file = load(proto)
    (held,) = file.proto.graph.initializer
    file.put(held, Range(tmp_path / "made.bin", 0, 64))
    assert {field.name for field, _ in held.ListFields()} == {
        "name", "dims", "data_type", "data_location", "external_data"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "fits"), [([3], True), ([0], True), ([1 << 48], True), ([(1 << 48) + 1], False), ([-1], False)]
)
def test_the_shape_of_a_stripped_tensor(dims, fits):
    proto = model("g (float[N,4] x) => (y) { y = Neg(x) }")
    proto.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=dims, doc_string="TRT_WEIGHTLESS/")
    if fits:
        assert len(load(proto).absent) == (dims != [0])
        return
    with pytest.raises(ModelError):
        load(proto)


def test_every_tensor_of_a_model_is_found():
    one = numpy_helper.from_array(np.ones(1, "f"))
    number = iter(range(100))

    def made():
        copy = TensorProto()
        copy.CopyFrom(one)
        copy.name = f"t{next(number)}"
        return copy

    def sparse():
        return onnx.SparseTensorProto(values=made(), indices=made(), dims=[2])

    inner = helper.make_graph([], "inner", [], [], [made()])
    attributes = {
        "tensor": made(), "tensors": [made(), made()], "sparse": sparse(), "sparses": [sparse()], "graph": inner,
        "graphs": [helper.make_graph([], "other", [], [], [made()])],
    }  # fmt: skip
    proto = model("g (float[N,4] x) => (y) { y = Neg(x) }")
    proto.graph.initializer.append(made())
    proto.graph.sparse_initializer.append(sparse())
    proto.graph.node.append(helper.make_node("Odd", [], ["z"], domain="odd", **attributes))
    proto.training_info.add().initialization.initializer.append(made())
    proto.training_info.add().algorithm.initializer.append(made())
    function = proto.functions.add(name="f", domain="odd")
    function.attribute_proto.append(helper.make_attribute("given", made()))
    function.node.append(helper.make_node("Constant", [], ["c"], value=made()))
    function.node.append(helper.make_node("Constant", [], ["d"], value=made()))
    function.node[-1].attribute[0].ref_attr_name = "given"  # the call has the value
    left_out = function.node[-1].attribute[0].t.name
    found = {tensor.name for tensor in tensors(proto)}
    assert found == {f"t{k}" for k in range(next(number))} - {left_out}


def test_a_model_in_memory_that_is_over_protobufs_limit_is_copied_all_the_same(monkeypatch):
    """A message of more than 2 GiB can be held and copied, and not be made into bytes."""
    given = model("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=normal(4, 4))

    too_large = Mock(SerializeToString=Mock(side_effect=ValueError("exceeds maximum protobuf size of 2GB")))
    monkeypatch.setattr("lsuv_cli.model.file._checked", lambda *given: too_large)
    held = load(given)
    assert held.proto == given
    assert held.proto is not given


def test_values_that_share_a_byte_are_read_from_a_data_file(tmp_path):
    given = helper.make_tensor("q", TensorProto.INT4, [3], np.array([-8, 3, 7]))
    proto = model("g (float[N,4] x) => (y, q) { y = Neg(x) }")
    (tmp_path / "d.bin").write_bytes(given.raw_data or bytes(given.int32_data))
    held = proto.graph.initializer.add(name="q", data_type=TensorProto.INT4, dims=[3])
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="d.bin")
    onnx.save(proto, tmp_path / "m.onnx")
    file = load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(file.array(file.proto.graph.initializer[0]).astype(int), [-8, 3, 7])


def test_a_model_from_a_pipe_has_no_directory_for_data_and_lives_as_long_as_its_copy():
    spool = Spool("model")
    given = model("g (float[N,80] x) => (y) { y = MatMul(x, w) }", w=normal(80, 80))
    spool.copy(io.BytesIO(given.SerializeToString()))
    file = load(spool)
    assert (file.path, file.given, file.name) == (None, spool, "<stdin>")
    (place,) = file.parked.values()
    assert isinstance(place, Range)
    assert place.spool is spool
    np.testing.assert_array_equal(file.array(file.proto.graph.initializer[0]), normal(80, 80))


def test_a_tensor_whose_values_come_into_the_model_is_no_longer_elsewhere():
    held = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="d.bin")
    embed(held, np.array([1, 2], np.float32).tobytes())
    assert not is_elsewhere(held)
    np.testing.assert_array_equal(numpy_helper.to_array(held), [1, 2])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.ClearField("opset_import"), "imports no operator set"),
        (lambda m: m.ClearField("graph"), "holds no graph"),
        (lambda m: m.graph.ClearField("node"), "holds no graph"),
    ],
)
def test_a_message_that_is_no_model(change, told):
    proto = model("g (float[N,4] x) => (y) { y = Neg(x) }")
    change(proto)
    for given in (proto, proto.SerializeToString()):
        with pytest.raises(ModelError, match=f"{told}|is empty"):
            load(given)


def test_a_name_that_is_not_utf_8():
    data = model("g (float[N,4] x) => (yyyy) { yyyy = Neg(x) }").SerializeToString()
    with pytest.raises(ModelError, match=r"is not UTF-8|is not an ONNX file"):
        load(data.replace(b"yyyy", b"y\xff\xfey"))


def test_an_empty_tensor_whose_file_is_missing_can_be_made_up(tmp_path):
    proto = model("g (float[N,4] x) => (y, e) { y = Neg(x) }")
    for name, dims in (("e", [0, 4]), ("w", [2])):
        held = proto.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=dims)
        held.data_location = TensorProto.EXTERNAL
        held.external_data.add(key="location", value="gone.bin")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert [tensor.name for tensor in load(tmp_path / "m.onnx", without_weights=True).absent] == ["e", "w"]
    with pytest.raises(ModelError, match="or let `lsuv init` make the values up"):
        load(tmp_path / "m.onnx")


def test_an_empty_tensor_in_a_data_file(tmp_path):
    (tmp_path / "d.bin").write_bytes(b"data")
    proto = model("g (float[N,4] x) => (y, e) { y = Neg(x) }")
    held = proto.graph.initializer.add(name="e", data_type=TensorProto.FLOAT, dims=[0, 4])
    held.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "d.bin"), ("offset", "4"), ("length", "0")):
        held.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    file = load(tmp_path / "m.onnx")
    assert file.array(file.proto.graph.initializer[0]).shape == (0, 4)
