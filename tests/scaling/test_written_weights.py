"""What readers see a layer's output multiplied by."""

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling.solve import Solution
from lsuv_cli.scaling.written_weights import Written
from working_copies import graph_of

NORMED = "z = Conv(x, w) y = BatchNormalization<epsilon=0.0>(z, two, no, no, four)"


@pytest.mark.parametrize(
    ("body", "shape", "factor"),
    [
        ("y = MatMul(x, w)", (4,), 3),
        ("y = MatMul(w, x)", (4, 1), 3),
        ("y = Conv(x, w)", (4, 1), 3),
        (NORMED, (4, 1), 6),
    ],
)
def test_the_factor_of_a_layer_and_of_its_channels(body, shape, factor):
    """The norm has weight 2·√4 = 4 and divides by √4: c = 2."""
    tensors = {"two": np.full(4, 4, "f"), "no": np.zeros(4, "f"), "four": np.full(4, 4, "f")}
    rank = "N,4,4" if "Conv" in body else "4,4"
    weight = normal(4, 4, 1) if "Conv" in body else normal(4, 4)
    look = layers_of(graph_of(f"g (float[{rank}] x) => (y) {{ {body} }}", w=weight, **tensors))
    (layer,) = look.layers.layers
    assert Written(Solution(), 3.0).factor(layer) == factor
    ratios = np.array([1.0, 2.0, 0.5, 1.5])
    found = np.asarray(Written(Solution(ratios=ratios), 3.0).factor(layer))
    assert found.shape == shape
    np.testing.assert_allclose(found.ravel(), factor * ratios)
