"""A share of the data: values in their types, types that batches have in common, and sums that can be trusted."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers import model, normal
from lsuv_cli.scaling import shares
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.moments import Probe, Sums
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runtime import Session, to_numpy
from lsuv_cli.scaling.shares import Share, common_type, is_trusted

CPU = Device(PROVIDERS["cpu"], 0, 1)


def stage(text, *fetches, **tensors):
    proto = model(text, **tensors)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetches)
    return StageModel(proto, {}, {i.name: i.name for i in proto.graph.input}, fetches, ())


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([3, 4], [3, 4], [3, 4]),
        ([3, 4], [5, 4], [None, 4]),
        ([3, 4], [3, None], [3, None]),
        ([None, 4], [3, 4], [None, 4]),
        ([], [], []),
        ([3, 4], [3, 4, 5], None),
        ([3, 4], None, None),
        (None, [3, 4], None),
    ],
)
def test_the_dimensions_that_two_types_have_in_common(one, other, expected):
    made = (helper.make_tensor_type_proto(TensorProto.DOUBLE, shape) for shape in (one, other, expected))
    one, other, expected = made
    assert common_type(one, other) == expected
    sequence = helper.make_sequence_type_proto(one)
    assert common_type(sequence, sequence) == sequence


class Counted(list[dict[str, np.ndarray]]):
    """Batches that count how often one is read."""

    reads = 0

    def __getitem__(self, number):
        self.reads += 1
        return super().__getitem__(number)


def test_a_stage_over_all_batches():
    """Data is cast to the type it is fed in, values wait under their names, and batches are read only where needed."""
    batches = Counted([{"x": np.arange(k + 2, dtype=np.int64)} for k in range(3)])
    share = Share(batches, {"x": np.dtype(np.float32)}, CPU, 10**6)
    done: list[int] = []
    first = stage("g (float[N] x) => (y) { y = Add(x, x) z = Neg(x) }", "y", "z")
    assert list(share.run(0, first, ["x"], done.append)) == [[], [], []]
    assert done == [1, 2, 3]
    assert batches.reads == 3
    assert share.waiting == 2 * 4 * (2 + 3 + 4)
    assert share.types(["y"]) == {"y": helper.make_tensor_type_proto(TensorProto.FLOAT, [None])}
    share.keep_only({"y"})
    assert share.waiting == 4 * (2 + 3 + 4)
    second = stage("g (float[N] y) => (t) { t = Mul(y, y) }", "t")
    assert len(list(share.run(1, second, ["y"], done.append))) == 3
    assert batches.reads == 3
    for number, batch in enumerate(batches):
        np.testing.assert_array_equal(to_numpy(share.value(number, {}, "t")), (2 * batch["x"]) ** 2)
    share.close()


def test_data_without_a_wanted_type_keeps_its_own():
    share = Share([{"i": np.arange(3)}], {"i": None}, CPU, 10**6)
    assert to_numpy(share.value(0, {"i": np.arange(3)}, "i")).dtype == np.int64


def test_a_session_that_is_open_already_is_used_for_its_model_only(monkeypatch):
    share = Share([{"x": normal(2, 3)}], {"x": None}, CPU, 10**6)
    wanted, other = (stage(f"g (float[N,3] x) => (y) {{ y = {op}(x) }}", "y") for op in ("Relu", "Neg"))
    made: list[StageModel] = []
    monkeypatch.setattr(shares, "Session", lambda model, device: made.append(model) or Session(model, device))
    for opened, more in ((wanted, []), (other, [wanted])):
        made.clear()
        share.session = Session(opened, CPU)
        list(share.run(0, wanted, ["x"], lambda count: None))
        assert made == more
        assert share.session is None
        np.testing.assert_array_equal(to_numpy(share.value(0, {}, "y")), np.maximum(normal(2, 3), 0))
    share.close()
    assert share.session is None


def test_sums_are_trusted_if_those_of_every_layer_are():
    """E[y²] - E[y]² of 10 elements in float32: exact enough for a mean of 0, and not for a mean of 1000."""
    fine, lost = Sums(10, (0.0, 10.0, 0.0), 10.0), Sums(10, (1e4, 1e7 + 10, 0.0), 10.0)
    probes = tuple(Probe(name, "p.", (1,), 1e-4) for name in "ab")
    whole = StageModel(onnx.ModelProto(), {}, {}, (), probes)
    assert is_trusted(whole, [fine, fine])
    assert not is_trusted(whole, [fine, lost])
    assert not is_trusted(whole, [lost, fine])
