"""Large tensors stay in the file that they came in, and the written bytes are protobuf's own."""

import io
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import lsuv_cli
from lsuv_cli.errors import LsuvError, ModelError, OutputError
from lsuv_cli.model import wire
from lsuv_cli.model.file import load
from lsuv_cli.model.places import Held, Range

rng = np.random.default_rng(5)
X = rng.standard_normal((64, 80)).astype(np.float32)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def model() -> onnx.ModelProto:
    """Four weights: an initializer, one that says it is embedded, a Constant, and one as a list of numbers."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N,80] x) => (float[N,80] z)'
    made = onnx.parser.parse_model(
        f"{text} {{ a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) c = MatMul(b, w) z = MatMul(c, l) }}"
    )
    made.graph.initializer.append(numpy_helper.from_array(normal(80, 80), "u"))
    said = numpy_helper.from_array(normal(80, 80), "v")
    said.data_location = TensorProto.DEFAULT  # as onnx.load does with external data
    said.doc_string = "v"
    made.graph.initializer.append(said)
    made.graph.initializer.append(helper.make_tensor("l", TensorProto.FLOAT, [80, 80], normal(80, 80).ravel()))
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(80, 80), "held"))
    made.graph.node.insert(0, constant)
    return made


def test_large_raw_data_is_parked_and_read_and_written_as_it_was(model, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for file in (load(path), load(path.read_bytes()), load(model)):
        assert len(file.parked) == 3
        assert file.proto.ByteSize() < 30_000  # `l`, which has no raw data, is in the message
        given = {t.name: numpy_helper.to_array(t) for t in wire.main_tensors(model.graph)}
        for tensor in wire.main_tensors(file.proto.graph):
            np.testing.assert_array_equal(file.array(tensor), given[tensor.name])
        assert b"".join(file.chunks()) == model.SerializeToString()
        assert file.embedded() == model


def test_the_result_is_the_same_whether_tensors_are_parked_or_not(model, tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    written = []
    for limit in (1 << 14, 1 << 40):
        monkeypatch.setattr(wire, "PARKED_BYTES", limit)
        out = tmp_path / f"{limit}.onnx"
        done = lsuv_cli.initialize(path, X, output=out)
        assert done.to_bytes() == out.read_bytes()
        assert done.model == onnx.load(out)
        assert lsuv_cli.initialize(path, X).to_bytes() == out.read_bytes()
        written.append(out.read_bytes())
    assert written[0] == written[1]
    assert written[0] == onnx.ModelProto.FromString(written[0]).SerializeToString()


def test_no_tensor_inside_of_a_node_that_runs_is_parked(tmp_path):
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(normal(80, 80)))],
        "then",
        [],
        [helper.make_tensor_value_info("k", TensorProto.FLOAT, [80, 80])],
        [numpy_helper.from_array(normal(80, 80), "unread")],
    )
    graph = onnx.GraphProto(name="g", node=[helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)])
    graph.node.append(helper.make_node("Constant", [], ["o"], "", None, "other", value=inner.initializer[0]))
    tensors = AttributeProto(name="values", type=AttributeProto.TENSORS, tensors=[inner.initializer[0]])
    graph.node.append(onnx.NodeProto(op_type="Constant", output=["q"], attribute=[tensors]))
    assert not load(helper.make_model(graph)).parked


def test_a_file_that_changes_during_the_run_is_told(model, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = load(path)
    path.write_bytes(model.SerializeToString() + b"\0\0")
    with pytest.raises(ModelError, match="changed during the run"):
        file.array(file.proto.graph.initializer[0])
    with pytest.raises(ModelError, match="changed during the run"):
        file.chunks()  # before the first byte is sent
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        file.array(file.proto.graph.initializer[0])


def test_a_file_with_a_mark_of_its_own_is_refused(model):
    wire.park(model.graph.initializer[0], "12")
    with pytest.raises(LsuvError, match="tensor 'u' has a mark in place of its values"):
        load(model.SerializeToString())


@pytest.mark.parametrize(
    "extra",
    [b"\xfb\x3e\xfc\x3e", b"\xf8\x3e\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"],  # an unknown group; ten bytes of varint
)
def test_what_is_unusual_in_a_file_stays_as_it_was(model, extra):
    data = model.SerializeToString() + extra
    file = load(data)
    assert b"".join(file.chunks()) == onnx.ModelProto.FromString(data).SerializeToString()


def test_a_cut_off_file_is_damaged(model):
    data = model.SerializeToString()
    for length in (len(data) - 1, len(data) // 2, 40):
        with pytest.raises(LsuvError, match="damaged"):
            load(data[:length])


def test_a_tensor_of_the_wrong_length_is_damaged(model):
    model.graph.initializer[0].dims[0] = 81
    with pytest.raises(LsuvError, match="'u' has 25600 bytes, its shape wants 25920"):
        load(model.SerializeToString())


def test_a_result_over_two_gibibytes_is_refused_before_it_is_written(model, monkeypatch):
    monkeypatch.setattr(wire, "LARGEST_MESSAGE", 50_000)
    with pytest.raises(LsuvError, match="2 GiB"):
        load(model).chunks()


@pytest.mark.parametrize("extra", [b"\xfd\x3e\x01\x02\x03\x04", b"\xf9\x3e" + bytes(range(1, 9)), b"\xf8\x3e\xac\x02"])
def test_unknown_fields_of_every_wire_type_are_skipped(model, extra):
    """Field 1007 as a number of 32 bits, of 64 bits, and as a varint; tensors are parked all the same."""
    for data in (model.SerializeToString() + extra, extra + model.SerializeToString()):
        file = load(data)
        assert len(file.parked) == 3
        assert b"".join(file.chunks()) == onnx.ModelProto.FromString(data).SerializeToString()


def test_a_constant_with_more_than_its_value_is_left_to_protobuf(model):
    constant = model.graph.node[0]
    assert len(load(model).parked) == 3
    constant.attribute.append(helper.make_attribute("also", 1))
    assert len(load(model).parked) == 2
    del constant.attribute[:]
    constant.attribute.append(helper.make_attribute("other", numpy_helper.from_array(normal(80, 80))))
    assert len(load(model).parked) == 2


def test_a_result_of_just_two_gibibytes_is_written(model, monkeypatch):
    whole = model.SerializeToString()
    monkeypatch.setattr(wire, "LARGEST_MESSAGE", len(whole))
    assert b"".join(load(model).chunks()) == whole
    monkeypatch.setattr(wire, "LARGEST_MESSAGE", len(whole) - 1)
    with pytest.raises(LsuvError, match="2 GiB"):
        load(model).chunks()


@pytest.mark.parametrize(("rows", "parked"), [(64, 1), (63, 0)])
def test_raw_data_of_16_kibibytes_is_large(rows, parked):
    graph = onnx.GraphProto(name="g", initializer=[numpy_helper.from_array(normal(rows, 64), "w")])
    data = helper.make_model(graph).SerializeToString()
    file = load(data)
    assert len(file.parked) == parked
    assert b"".join(file.chunks()) == data
    np.testing.assert_array_equal(
        file.array(file.proto.graph.initializer[0]), numpy_helper.to_array(graph.initializer[0])
    )


@pytest.mark.parametrize("field", ["float_data", "external_data", "data_location", "two types", "a packed type"])
def test_a_tensor_with_something_unusual_is_left_to_protobuf(field):
    held = numpy_helper.from_array(normal(80, 80), "w")
    if field == "float_data":
        held.float_data.append(1.0)
    elif field == "external_data":
        held.external_data.add(key="location", value="x")
    elif field == "data_location":
        held.data_location = TensorProto.EXTERNAL
    elif field == "a packed type":
        held.data_type = TensorProto.INT4
    data = held.SerializeToString()
    if field == "two types":
        data += TensorProto(data_type=TensorProto.FLOAT).SerializeToString()
    graph = onnx.GraphProto(name="g").SerializeToString() + b"\x2a" + _varint(len(data)) + data
    whole = b"\x3a" + _varint(len(graph)) + graph
    message, parked = wire.without_large_tensors(io.BytesIO(whole), len(whole))
    assert not parked
    assert message == whole


def _varint(number: int) -> bytes:
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])


@pytest.mark.parametrize(("size", "fits"), [((1 << 31) - 1000, True), (1 << 31, False)])
def test_a_message_is_no_larger_than_protobufs_2_gib(model, tmp_path, size, fits):
    """Nothing is read before all is known to fit, so that the range can be any."""
    held = model.graph.initializer[0]
    del model.graph.initializer[1:], model.graph.node[0]
    wire.park(held, "key")
    (tmp_path / "d").write_bytes(b"")
    parts = [model, lambda tensor: Range(tmp_path / "d", 0, size)]
    if fits:
        wire.chunks(*parts)
    else:
        with pytest.raises(OutputError, match="2 GiB"):
            wire.chunks(*parts)


def test_a_parked_tensor_is_not_external_too():
    held = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="d.bin")
    wire.park(held, "key")
    assert held.data_location != TensorProto.EXTERNAL
    assert wire.is_parked(held)
    assert wire.key_of(held) == "key"
    said = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.DEFAULT)
    wire.park(said, "key")
    assert said.HasField("data_location")  # which stays as it was given


@pytest.mark.parametrize("number", [0, 1, 126, 127, 128, 16383, 16384, (1 << 31) - 1, 1 << 40])
def test_numbers_are_written_as_protobuf_writes_them(number):
    expected = onnx.ModelProto(ir_version=number).SerializeToString()[1:]  # behind the field's tag
    assert wire._encoded(number) == expected
    assert wire._varint(io.BytesIO(expected + b"more")) == number


def test_what_is_cut_off_or_too_long_is_left_to_protobuf():
    for data in (b"", b"\x80", b"\xff" * 12):
        with pytest.raises(wire._Unusual):
            wire._varint(io.BytesIO(data))
    with pytest.raises(wire._Unusual):
        wire._copied(io.BytesIO(b"abc"), 1, 5)


@pytest.mark.parametrize("raised", [EncodeError("too large"), ValueError("exceeds maximum protobuf size")])
def test_a_message_that_protobuf_does_not_write_is_told_in_a_line(raised):
    with pytest.raises(OutputError, match="2 GiB"):
        wire.chunks(Mock(SerializeToString=Mock(side_effect=raised)), lambda tensor: Held(memoryview(b"")))
