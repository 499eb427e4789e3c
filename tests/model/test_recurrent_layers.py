"""LSTM, GRU and RNN: orthonormal gate by gate if asked, else left alone."""

import numpy as np
import pytest

from helpers import (
    entry,
    is_orthonormal,
    model,
    near_one,
    normal,
    tensor,
    unchanged_but,
    variances,
)
from lsuv_cli import initialize

RECURRENT = {
    "LSTM": (4, "y, h, c = LSTM<hidden_size=6>(x, w, r, b)"),
    "GRU": (3, "y, h = GRU<hidden_size=6>(x, w, r, b)"),
    "RNN": (1, "y, h = RNN<hidden_size=6>(x, w, r, b)"),
}


def recurrent(op):
    gates, call = RECURRENT[op]
    return gates, model(
        f"""g (float[T,N,5] x) => (float z) {{ {call}
            a = Constant<value_ints=[1]>() s = Squeeze(y, a) z = MatMul(s, v) }}""",
        w=normal(1, gates * 6, 5),
        r=normal(1, gates * 6, 6),
        b=normal(1, 2 * gates * 6),
        v=normal(6, 4),
    )


@pytest.mark.parametrize("op", RECURRENT)
def test_a_recurrent_layer_is_orthonormal_gate_by_gate_if_asked(op):
    gates, before = recurrent(op)
    x = normal(7, 16, 5, seed=1)
    result = initialize(before, x, batch_size="all", recurrent=True)
    assert entry(result, "y").status == "pre-init"
    for name in ("w", "r"):
        weight = tensor(result.model, name)[0]
        assert all(is_orthonormal(gate) for gate in np.split(weight, gates))
        assert np.allclose(np.linalg.norm(weight[:5], axis=0 if name == "w" else 1)[0], 1, atol=1)
        assert weight.any()
    assert near_one(variances(result.model, {"x": x}, ["z"]))
    assert unchanged_but(before, result.model, "w", "r", "v")


@pytest.mark.parametrize("op", RECURRENT)
def test_a_recurrent_layer_is_left_alone_otherwise(op):
    _, before = recurrent(op)
    result = initialize(before, normal(7, 16, 5), batch_size="all")
    assert entry(result, "y").status == "skipped"
    assert "`recurrent=True`" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


def test_a_recurrent_weight_that_something_else_reads_is_not_written():
    before = model(
        """g (float[T,N,6] x) => (float[T,D,N,6] y, float[T,D,N,6] z) {
            y, h = RNN<hidden_size=6>(x, w, r) z, i = RNN<hidden_size=6>(x, w, s) }""",
        w=normal(1, 6, 6),
        r=normal(1, 6, 6),
        s=normal(1, 6, 6),
    )
    x = normal(7, 16, 6)
    result = initialize(before, x, batch_size="all", recurrent=True)
    assert {layer.status for layer in result.report.layers} == {"skipped"}
    assert unchanged_but(before, result.model)
    untied = initialize(before, x, batch_size="all", recurrent=True, tied="untie").model
    names = [node.input[1] for node in untied.graph.node]
    assert len(set(names)) == 2
    assert all(is_orthonormal(tensor(untied, name)[0]) for name in names)
