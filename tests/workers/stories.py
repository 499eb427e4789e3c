"""Models and data for the tests of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from helpers import model, normal

SAMPLES, BATCH = 40, 4


def tanhs(depth: int = 4, size: int = 16) -> onnx.ModelProto:
    """Inner products with tanh between them: a stage for each."""
    nodes = "".join(f"v{k + 1} = MatMul(t{k}, w{k}) t{k + 1} = Tanh(v{k + 1}) " for k in range(depth))
    text = f"x (float[N,{size}] x) => (t{depth}) {{ {nodes} }}".replace("t0", "x")
    return model(text, **{f"w{k}": 0.05 * normal(size, size, seed=k) for k in range(depth)})


def images() -> onnx.ModelProto:
    """Convolutions, a sum, a mean far from zero that has to be measured in the exact form, an inner product."""
    shapes = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 8, 3, 3), "w3": (10, 8)}
    return model(
        """x (float[N,3,8,8] x) => (y) {
            a = Conv <pads=[1,1,1,1]> (x, w0) ra = Sigmoid(a) far = Add(ra, shift)
            b = Conv <pads=[1,1,1,1]> (far, w1) rb = Relu(b)
            c = Conv <pads=[1,1,1,1]> (rb, w2) s = Add(c, ra) rs = Tanh(s)
            p = GlobalAveragePool(rs) f = Flatten(p)
            y = Gemm <transB=1> (f, w3) }""",
        shift=np.array(1e4, np.float32),
        **{name: 0.05 * normal(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())},
    )


STORIES: dict[str, tuple[onnx.ModelProto, Any, dict[str, Any]]] = {
    "tanhs": (tanhs(), normal(SAMPLES, 16), {}),
    "images": (images(), normal(SAMPLES, 3, 8, 8), {}),
    "channels": (images(), normal(SAMPLES, 3, 8, 8), {"scale": "channel", "bias": "center"}),
    "a short last batch": (tanhs(), normal(SAMPLES - 1, 16), {"seed": 3}),
    "xavier, before too": (tanhs(3), normal(SAMPLES, 16), {"pre_init": "xavier", "before": True}),
    "not scaled": (tanhs(3, size=300), normal(SAMPLES, 300), {"rescale": False}),
    "large weights": (tanhs(3, size=300), normal(SAMPLES, 300), {}),
}


def bits(done: Any) -> bytes:
    return bytes(done.model.SerializeToString(deterministic=True))


def figures(report: Any) -> list[Any]:
    """Everything that was measured."""
    return [(x.name, x.variance_given, x.variance_at_turn, x.scale, x.variance, x.mean, x.dead) for x in report.layers]
