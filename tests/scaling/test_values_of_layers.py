"""The values that layers put out: bit by bit those of unoptimized onnxruntime, batch by batch, piece by piece."""

import numpy as np
import onnxruntime as ort
import pytest

from helpers import exposed, model, normal
from lsuv_cli.model.file import load
from lsuv_cli.model.prepare import look
from lsuv_cli.scaling import values
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runner import Pass

BATCHES = [normal(4, 3, 9, 9), normal(2, 3, 9, 9, seed=1)]


def network():
    """Convolutions, which optimized onnxruntime runs in another layout, with other roundings."""
    tensors = {name: normal(16, size, 3, 3, seed=k) for k, (name, size) in enumerate([("u", 3), ("v", 16), ("w", 16)])}
    return model(
        "g (float[N,3,9,9] x) => (y) { a = Conv(x, u) r = Relu(a) b = Conv(r, v) s = Relu(b) y = Conv(s, w) }",
        **tensors,
    )


def unoptimized(proto, batch, names):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        exposed(proto, names).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(names, {"x": batch})


@pytest.mark.parametrize(("piece_bytes", "wanted"), [(1 << 20, ["a", "b", "y"]), (1 << 20, ["b"]), (1, ["a", "y"])])
def test_the_outputs_of_layers(monkeypatch, piece_bytes, wanted):
    monkeypatch.setattr(values, "PIECE_BYTES", piece_bytes)
    proto = network()
    seen = look(load(proto))
    layers = [layer for layer in seen.layers.layers if layer.output in wanted]
    batches = [{"x": batch} for batch in BATCHES]
    needs = Pass(batches, Device(PROVIDERS["cpu"], 0, 1), 1 << 30, lambda *_: None, 1e-3, batches[1])
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for layer, array in values.layer_outputs(seen, layers, needs):
        found[layer.output].append(array)
    for k, batch in enumerate(BATCHES):
        for name, expected in zip(wanted, unoptimized(proto, batch, wanted), strict=True):
            np.testing.assert_array_equal(found[name][k], expected)
    assert {len(arrays) for arrays in found.values()} == {2}
