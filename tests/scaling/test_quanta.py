"""Quantized weights without values: integers and scales worked out by hand, and their bytes."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers import model
from lsuv_cli.model import graph as graphs
from lsuv_cli.scaling import quanta
from lsuv_cli.scaling.quanta import Quantum
from working_copies import Source

MATRIX = [16, 64]  # √64 = 8


def found(body, kind, shape, absent=("w",), **tensors):
    """What is found for a weight w of this type; `tensors` have values, unless they are absent."""
    text = f"g (float[N,64] x, int64[N] ids) => (y) {{ {body} }}"
    proto = model(text, opset=21, ir=10, microsoft=True, **tensors)
    proto.graph.initializer.add(name="w", data_type=kind, dims=shape)
    graph = graphs.build(proto, Source())
    return quanta.find(graph, {name: graph.tensors[name] for name in absent})


def of_weight(kind, scale, zero=None, shape=MATRIX):
    """The quantum of a weight whose scale is known."""
    body = "y = DequantizeLinear(w, s)" if zero is None else "y = DequantizeLinear(w, s, z)"
    given = {} if zero is None else {"z": np.asarray(zero)}
    (made,) = found(body, kind, shape, s=np.asarray(scale, np.float32), **given).values()
    return made


@pytest.mark.parametrize(
    ("shape", "fan_in"), [((), 1), ((5,), 1), ((3, 5), 5), ((5, 3), 5), ((9, 2, 3, 4), 24), ((4, 0, 3), 1)]
)
def test_the_fan_in_by_the_shape(shape, fan_in):
    assert quanta.reach(shape) == fan_in


@pytest.mark.parametrize(
    ("kind", "std", "bits"),
    [("INT8", 32, 8), ("UINT8", 32, 8), ("INT4", 2.5, 4), ("UINT4", 2.5, 4), ("FLOAT8E4M3FN", 1, 0)],
)
def test_a_weight_and_its_scale_without_values(kind, std, bits):
    """Var(y) = fan-in·Var(q)·s² = 64·std²·s² = 1."""
    kind = getattr(TensorProto, kind)
    body = "y = DequantizeLinear(w, s, z)"
    made = found(body, kind, MATRIX, ("w", "s", "z"), s=np.ones(1, np.float32), z=np.zeros(1, np.uint8))
    assert made == {name: Quantum(std, bits, 1 / (std * 8)) for name in ("w", "s")}


@pytest.mark.parametrize(
    ("kind", "scale", "std"),
    [
        ("INT8", 0.01, 12.5),  # 1 / (0.01·8)
        ("INT8", [0.02, -0.02, 0.005, 0.005], 10),  # the mean of |s| counts
        ("INT8", 1e-4, 40),  # no more than the type has room for
        ("FLOAT8E4M3FN", 1e-4, 40),
        ("INT4", 1e-4, 2.5),
        ("INT4", 0.1, 1.25),
        ("INT8", 1.0, 0.5),  # no fewer than two values
        ("INT8", 0.0, 32),
        ("INT4", [], 2.5),
    ],
)
def test_a_known_scale_decides_the_integers(kind, scale, std):
    made = of_weight(getattr(TensorProto, kind), scale)
    assert made.std == pytest.approx(std)
    assert made.step == pytest.approx(np.abs(scale).mean() if np.size(scale) else 1 / (2.5 * 8))


@pytest.mark.parametrize(
    ("kind", "zero", "offset"),
    [
        ("INT8", None, 0),
        ("INT8", 3, 3),
        ("INT4", 3, 3),
        ("UINT8", None, -128),
        ("UINT8", 100, -28),
        ("UINT8", [127, 129], 0),
        ("UINT4", 8, 0),
        ("UINT4", None, -8),
        ("FLOAT8E4M3FN", None, 0),
        ("UINT8", [], -128),
    ],
)
def test_where_a_known_zero_point_lies_from_the_middle_of_the_type(kind, zero, offset):
    zero = None if zero is None else np.asarray(zero, np.uint8 if kind == "UINT8" else np.int8)
    assert of_weight(getattr(TensorProto, kind), 0.01, zero).offset == offset


@pytest.mark.parametrize(("bits", "given", "std"), [(4, "", 2.5), (2, ", bits=2", 0.7), (8, ", bits=8", 32)])
def test_bytes_that_hold_several_integers(bits, given, std):
    """MatMulNBits says its fan-in K itself; its zero points, packed too, are made with it."""
    body = f"y = com.microsoft.MatMulNBits<K=100, N=16, block_size=32{given}>(x, w, s, z)"
    tensors = {"s": np.ones(64, np.float32), "z": np.zeros(32, np.uint8)}
    made = found(body, TensorProto.UINT8, [16, 4, 16], ("w", "s", "z"), **tensors)
    assert made == dict.fromkeys("wsz", Quantum(std, bits, 1 / (std * 10)))
    assert made["w"].offset == 0.0  # around the middle
    assert set(found(body, TensorProto.UINT8, [16, 4, 16], **tensors)) == {"w"}


def test_the_rows_of_a_packed_embedding_have_variance_1():
    body = "y = com.microsoft.GatherBlockQuantized(w, ids, s)"
    made = found(body, TensorProto.UINT4, [16, 64], ("w", "s"), s=np.ones((16, 4), np.float32))
    assert made == {name: Quantum(2.5, 4, 1 / 2.5) for name in "ws"}


@pytest.mark.parametrize(
    "body",
    [
        "y = com.microsoft.DequantizeLinear(w, s)",
        "y = local.GatherBlockQuantized(w, ids, s)",
        "y = MatMulInteger(w, s)",
        "y = DequantizeLinear(v, s)",
    ],
)
def test_what_is_no_quantized_weight_without_values(body):
    assert not found(body, TensorProto.INT8, MATRIX, s=np.float32(1), v=np.ones(4, np.int8))


@pytest.mark.parametrize(
    ("kind", "bits", "numbers", "expected"),
    [
        # -8 is 1000 in two's complement, the first integer is the lower half of a byte, and the last byte is filled up.
        ("INT4", 4, [-9, -8, 7, 8, 1.4], [0x88, 0x77, 0x01]),
        ("INT4", 4, [-1, 2], [0x2F]),
        ("UINT4", 4, [-8, 7, 0, 20], [0xF0, 0xF8]),  # around 8
        ("UINT8", 4, [0, -8, 7, 1], [0x08, 0x9F]),
        ("UINT8", 2, [-2, -1, 0, 1], [0b11100100]),  # around 2
        ("UINT8", 8, [-128, 0, 200], [0, 128, 255]),
        ("INT2", 2, [-2, -1, 0, 1, 5], [0b01001110, 0b00000001]),
        ("UINT2", 2, [-9, 1, 0, -1], [0b01101100]),
    ],
)
def test_integers_as_bytes(kind, bits, numbers, expected):
    if not hasattr(TensorProto, kind):
        pytest.skip(f"this onnx has no {kind}")
    tensor = helper.make_tensor("w", getattr(TensorProto, kind), [0], [])
    assert list(quanta.packed(tensor, np.asarray(numbers, np.float32), bits)) == expected
