"""Inputs that are indices, and the rows of the tables that they look up."""

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.indices import tables
from working_copies import graph_of

EMBED = "com.microsoft.EmbedLayerNormalization"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Gather(ten, i)", {"i": 10}),
        ("y = Gather<axis=1>(ten, i)", {"i": 4}),
        ("y = Gather<axis=-1>(ten, i)", {"i": 4}),
        ("y = Gather<axis=-2>(ten, i)", {"i": 10}),
        ("y = Gather<axis=2>(ten, i)", {}),
        ("y = Gather<axis=-3>(ten, i)", {}),
        ("a = Gather(ten, i) b = Gather(seven, i) y = Concat<axis=0>(a, b)", {"i": 7}),
        ("a = Gather(seven, i) b = Gather(ten, i) y = Concat<axis=0>(a, b)", {"i": 7}),
        ("c = Cast<to=7>(i) r = Reshape(c, one) y = Gather(ten, r)", {"i": 10}),
        ("c = Abs(i) y = Gather(ten, c)", {}),
        ("y = Gather(x, i)", {}),
        ("y = Gather(none, i)", {}),
        ("y = com.microsoft.Gather(ten, i)", {}),
        (f"y, m = {EMBED}(i, j, ten, none, seven)", {"i": 10, "j": 7}),
        (f"y, m = {EMBED}(i, j, ten, none, seven, s, s)", {"i": 10, "j": 7}),
        (f"y, m = {EMBED}(i, j, ten, none)", {}),
        ("y, m = EmbedLayerNormalization(i, j, ten, none, seven)", {}),
    ],
)
def test_the_rows_of_the_smallest_table(body, expected):
    text = f"g (int64[N] i, int64[N] j, float[N,4] x) => (y) {{ {body} }}"
    tensors = {"ten": normal(10, 4), "seven": normal(7, 4), "none": normal(0, 4), "s": normal(4), "one": np.array([-1])}
    assert tables(graph_of(text, microsoft=True, **tensors)) == expected
