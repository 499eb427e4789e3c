"""Values for tensors that have none: constants by their role, and random numbers whose size is worked out by hand."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import model, tensor
from lsuv_cli import LsuvError
from lsuv_cli.model.file import load
from lsuv_cli.model.roles import Role
from lsuv_cli.scaling import filling


def without_values(text, kinds, opset=21, **tensors):
    """A model whose tensors of these types and shapes have no values."""
    proto = model(text, opset=opset, ir=10, microsoft=True, **tensors)
    for name, (kind, dims) in kinds.items():
        proto.graph.initializer.add(name=name, data_type=kind, dims=dims, doc_string="TRT_WEIGHTLESS/")
    return load(proto, without_weights=True)


def filled(text, kinds, seed=0, **tensors):
    file = without_values(text, kinds, **tensors)
    filling.fill(file, seed)
    return {held.name: held for held in file.proto.graph.initializer}


@pytest.mark.parametrize(
    ("role", "value"),
    [(Role.VARIANCE, 1), (Role.SCALE, 1), (Role.BIAS, 0), (Role.SLOPE, 1 / 4), (Role.QUANTUM, 1 / 32)],
)
def test_constants(role, value):
    made = filling.values(role, (2, 3), 0, "t")
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, np.full((2, 3), value))


@pytest.mark.parametrize(
    ("role", "shape", "std"),
    [
        (Role.TABLE, (30, 20), 0.02),
        (Role.WEIGHT, (30, 20), 1 / np.sqrt(30)),
        (Role.WEIGHT, (20, 30), 1 / np.sqrt(30)),
        (Role.WEIGHT, (20, 5, 3, 2), 1 / np.sqrt(30)),
        (Role.TIED, (30, 20), 1 / np.sqrt(20)),
    ],
)
def test_random_numbers_are_those_of_an_embedding_times_a_standard_deviation(role, shape, std):
    plain = filling.values(Role.EMBEDDING, shape, 3, "t")
    assert plain.std() == pytest.approx(1, rel=0.2)
    np.testing.assert_allclose(filling.values(role, shape, 3, "t"), std * plain, rtol=1e-6)


@pytest.mark.parametrize(("shape", "std"), [((64, 16), 4), ((16, 4, 4), 8), ((4096, 2), 1)])
def test_a_quantized_weight_has_whole_numbers(shape, std):
    """32 / √fan-in, and at least 1."""
    plain = filling.values(Role.EMBEDDING, shape, 3, "t")
    np.testing.assert_array_equal(filling.values(Role.QUANTIZED, shape, 3, "t"), np.rint(np.float32(std) * plain))


def test_seed_and_name_decide_the_numbers():
    first, again, other, elsewhere = (
        filling.values(Role.WEIGHT, (4, 4), *which) for which in ((0, "a"), (0, "a"), (1, "a"), (0, "b"))
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, elsewhere)


DEQUANTIZED = "g (float[N,64] x) => (y) { q = DequantizeLinear(w, s, z) y = MatMul(x, q) }"


@pytest.mark.parametrize(("kind", "zero"), [(np.uint8, 128), (np.uint8, 100), (np.int8, 5)])
def test_integers_around_their_zero_point(kind, zero):
    """s·√64·std = 1, so std = 12.5 for s = 0.01."""
    kinds = {"w": (helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [64, 64])}
    made = filled(DEQUANTIZED, kinds, s=np.float32(0.01), z=np.array(zero, kind))
    whole = numpy_helper.to_array(made["w"]).astype(np.float64)
    assert whole.mean() == pytest.approx(zero, abs=1)
    assert whole.std() == pytest.approx(12.5, rel=0.05)
    assert not made["w"].doc_string


def test_a_scale_and_a_zero_point_without_values():
    kinds = {"w": (TensorProto.INT8, [64, 64]), "s": (TensorProto.FLOAT, [64]), "z": (TensorProto.INT8, [64])}
    made = {name: numpy_helper.to_array(held) for name, held in filled(DEQUANTIZED, kinds).items()}
    np.testing.assert_allclose(made["s"], np.full(64, 1 / 256), rtol=1e-6)  # 1 / (32·√64)
    np.testing.assert_array_equal(made["z"], np.zeros(64))
    assert made["w"].std() == pytest.approx(32, rel=0.05)
    assert abs(made["w"].mean()) < 2


def test_floats_of_8_bits_are_not_rounded():
    made = filled(
        "g (float[N,64] x) => (y) { q = DequantizeLinear(w, s) y = MatMul(x, q) }",
        {"w": (TensorProto.FLOAT8E4M3FN, [64, 64])},
        s=np.float32(1 / 8),
    )
    found = numpy_helper.to_array(made["w"]).astype(np.float64)
    assert found.std() == pytest.approx(1, rel=0.05)
    assert np.any(found != np.rint(found))


@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (2, 2)])
def test_bytes_of_several_integers(bits, middle):
    kinds = {
        "w": (TensorProto.UINT8, [64, 2, 4 * bits]),
        "s": (TensorProto.FLOAT, [128]),
        "z": (TensorProto.UINT8, [64, 1]),
    }
    call = f"com.microsoft.MatMulNBits<K=64, N=64, bits={bits}, block_size=32>(x, w, s, z)"
    text = f"g (float[N,64] x) => (y) {{ y = {call} }}"
    made = {name: numpy_helper.to_array(held) for name, held in filled(text, kinds).items()}
    parts = np.stack([made["w"] >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]).astype(np.float64)
    assert parts.mean() == pytest.approx(middle, abs=0.1)
    assert parts.std() == pytest.approx({4: 2.5, 2: 0.7}[bits], rel=0.1)
    assert set(made["z"].ravel()) == {0x88 if bits == 4 else 0b10101010}
    np.testing.assert_allclose(made["s"], np.full(128, 1 / ({4: 2.5, 2: 0.7}[bits] * 8)), rtol=1e-6)


@pytest.mark.parametrize(("kind", "middle"), [(TensorProto.INT8, 0), (TensorProto.UINT8, 128)])
def test_integers_that_no_scale_belongs_to_are_around_the_middle(kind, middle):
    """Of MatMulInteger: 32 / √16 = 8."""
    given = "int8" if kind == TensorProto.INT8 else "uint8"
    made = filled(f"g ({given}[N,16] x) => (y) {{ y = MatMulInteger(x, w) }}", {"w": (kind, [16, 16])})
    whole = numpy_helper.to_array(made["w"]).astype(np.float64)
    assert whole.mean() == pytest.approx(middle, abs=2)
    assert whole.std() == pytest.approx(8, rel=0.15)


def test_integers_stay_within_their_type():
    """A fan-in of 1 asks for a standard deviation of 32, and 20,000 numbers go beyond four of them."""
    made = filled(
        "g (int8[N,1,4] x) => (y) { y = ConvInteger(x, w) }", {"w": (TensorProto.INT8, [20000, 1, 1])}, seed=1
    )
    whole = numpy_helper.to_array(made["w"])
    assert whole.min() == -128 or whole.max() == 127
    assert whole.astype(np.float64).std() == pytest.approx(32, rel=0.02)  # none goes round to the other end


def test_packed_floats_are_zero():
    made = filled(
        "g (float[N,3] x) => (y) { q = Cast<to=1>(w) y = MatMul(x, q) }", {"w": (TensorProto.FLOAT4E2M1, [3, 3])}
    )
    assert made["w"].raw_data == bytes(5)


def test_values_that_would_take_more_than_half_of_the_memory_need_a_file(monkeypatch, tmp_path):
    kinds = {"w": (TensorProto.FLOAT, [10, 10])}
    text = "g (float[N,10] x) => (y) { y = MatMul(x, w) }"
    monkeypatch.setattr(filling, "available_memory", lambda: 799)
    with pytest.raises(LsuvError, match="400 bytes; give a file"):
        filling.fill(without_values(text, kinds), 0)
    filling.fill(without_values(text, kinds), 0, tmp_path)
    monkeypatch.setattr(filling, "available_memory", lambda: 800)
    filling.fill(without_values(text, kinds), 0)


def test_more_than_a_limit_goes_to_a_file(monkeypatch, tmp_path):
    kinds = {"w": (TensorProto.FLOAT, [10, 10]), "v": (TensorProto.FLOAT, [10, 5])}
    text = "g (float[N,10] x) => (y) { h = MatMul(x, w) y = MatMul(h, v) }"
    monkeypatch.setattr(filling, "EMBEDDED", 600)
    within = without_values(text, kinds)
    told = filling.fill(within, 0, tmp_path)
    assert told == "2 tensors had no values and were made by their role: 2 weights"
    assert not list(tmp_path.iterdir())
    assert not within.absent
    monkeypatch.setattr(filling, "EMBEDDED", 599)
    beyond = without_values(text, kinds)
    filling.fill(beyond, 0, tmp_path)
    assert (tmp_path / "filled.data").stat().st_size == 600
    for held in beyond.proto.graph.initializer:
        np.testing.assert_array_equal(beyond.array(held), tensor(within.proto, held.name))


def test_integers_that_are_missing_cannot_be_made_up(tmp_path):
    proto = model("g (float[N,4] x) => (y) { y = Reshape(x, shape) }")
    held = proto.graph.initializer.add(name="shape", data_type=TensorProto.INT64, dims=[2])
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="gone.bin")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(LsuvError, match="'shape' of integers has no values, which cannot be made up"):
        filling.fill(load(tmp_path / "m.onnx", without_weights=True), 0)
