"""Names that verification adds to a piece of a model: none that the model has."""

import pytest

from helpers import normal
from lsuv_cli.scaling import pieces
from working_copies import graph_of


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (("x", "w", "y"), "gauge0:"),
        (("gauge0:layer0", "w", "y"), "gauge1:"),
        (("x", "gauge0:", "y"), "gauge1:"),
        (("x", "w", "gauge0:layer0/mean"), "gauge1:"),
        (("gauge0:a", "gauge1:b", "gauge2:c"), "gauge3:"),
    ],
)
def test_a_prefix_that_no_name_of_the_graph_has(names, prefix):
    x, w, y = (f'"{name}"' for name in names)
    graph = graph_of(f"g (float[N,4] {x}) => ({y}) {{ {y} = MatMul({x}, {w}) }}", **{names[1]: normal(4, 4)})
    assert pieces._prefix(graph) == prefix


def test_a_name_inside_a_body_counts_too():
    text = """g (float[N,4] x, bool c) => (y) {
        i = If(c) <then_branch = t () => (a) { "gauge0:k" = Relu(x) a = Identity("gauge0:k") },
                   else_branch = e () => (b) { b = Identity(x) }>
        y = MatMul(i, w) }"""
    assert pieces._prefix(graph_of(text, w=normal(4, 4))) == "gauge1:"
