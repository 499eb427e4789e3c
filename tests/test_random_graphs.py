"""Graphs that nobody thought of: random ones, with every kind of branch, tie and bias, measured independently."""

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import model, normal, tensor, unchanged_but, values, variances
from lsuv_cli import initialize

X = normal(32, 6, seed=1)
ONE = ["Relu", "Tanh", "LeakyRelu", "Neg", "Identity", "Abs", "Sigmoid", "Transpose", "Shape", "Half", "Norm", "Sum"]
TWO = ["Add", "Concat", "Mul", "Max", "If"]
TIED = ["share", "untie", "skip"]
LAYERS = ["MatMul", "Gemm", "MatMulAdd", "Tied", "Excluded", "Computed"]


class Recipe:
    """A random graph of values with 6 features each."""

    def __init__(self, draw):
        self.nodes: list[str] = []
        self.tensors: dict[str, Any] = {}
        self.layers: dict[str, str] = {}
        self.tied: list[str] = []
        self.biases: list[str] = []
        self.values = ["x"]
        self.pick = lambda options: draw(st.sampled_from(options))
        for k in range(draw(st.integers(2, 12))):
            self.values.append(self.step(k, draw(st.sampled_from(ONE + TWO + 3 * LAYERS))))
        if not self.layers:
            self.values.append(self.step(99, "MatMul"))

    def weight(self, k, rows=6):
        self.tensors[f"w{k}"] = normal(rows, 6, seed=k) * 10.0 ** (k % 5 - 2)
        return f"w{k}"

    def bias(self, k):
        """Its own, or one that another layer has already."""
        if self.biases and k % 2:
            return self.biases[0]
        self.tensors[f"b{k}"] = 0.3 * normal(6, seed=100 + k)
        self.biases.append(f"b{k}")
        return f"b{k}"

    def step(self, k, op):
        x, v = self.pick(self.values), f"v{k}"
        y = self.pick(self.values) if op in TWO or op == "Computed" else ""
        match op:
            case "MatMul":
                self.layers[v] = self.weight(k)
                self.nodes.append(f"{v} = MatMul({x}, w{k})")
            case "Gemm":
                self.layers[v] = self.weight(k)
                self.nodes.append(f"{v} = Gemm<alpha=0.5>({x}, w{k}, {self.bias(k)})")
            case "MatMulAdd":
                self.layers[v] = self.weight(k)
                self.nodes.append(f"m{k} = MatMul({x}, w{k}) {v} = Add({self.bias(k)}, m{k})")
            case "Tied":
                self.tensors["tied"] = normal(6, 6, seed=50)
                self.tied.append(v)
                self.nodes.append(f"{v} = MatMul({x}, tied)")
            case "Excluded":
                self.nodes.append(f"[fixed{k}] {v} = MatMul({x}, {self.weight(k)})")
            case "Computed":
                self.layers[v] = self.weight(k, 12)
                self.nodes.append(f"c{k} = Concat<axis=1>({x}, {y}) {v} = MatMul(c{k}, w{k})")
            case "Concat":
                self.nodes.append(f"c{k} = Concat<axis=1>({x}, {y}) {v} = Slice(c{k}, three, nine, one)")
                self.tensors |= {"three": np.array([3]), "nine": np.array([9]), "one": np.array([1])}
            case "If":
                then = f"yes{k} () => (float[N,6] p{k}) {{ p{k} = Add({x}, {y}) }}"
                other = f"no{k} () => (float[N,6] q{k}) {{ q{k} = Identity({x}) }}"
                self.nodes.append(f"{v} = If (flag) <then_branch = {then}, else_branch = {other}>")
                self.tensors["flag"] = np.array(True)
            case "Transpose":
                self.nodes.append(f"t{k} = Transpose<perm=[1,0]>({x}) {v} = Transpose<perm=[1,0]>(t{k})")
            case "Shape":
                self.nodes.append(f"s{k} = Shape({x}) {v} = Reshape({x}, s{k})")
            case "Norm":
                # Statistics of one number each multiply; a shift or different numbers do not.
                shift = self.pick([0.0, 0.4])
                self.tensors |= {"s": np.full(6, 3, np.float32), "m": np.zeros(6, np.float32)}
                self.tensors[f"t{shift}".replace(".", "_")] = np.full(6, shift, np.float32)
                call = f"BatchNormalization({x}, s, t{shift}, m, s)".replace(".", "_")
                self.nodes.append(f"{v} = {call}")
            case "Sum":
                self.nodes.append(f"n{k} = ReduceMean<keepdims=1>({x}, last) {v} = Sub({x}, n{k})")
                self.tensors["last"] = np.array([-1])
            case "Half":
                self.nodes.append(f"{v} = Mul({x}, half)")
                self.tensors["half"] = np.float32(0.5)
            case _:
                self.nodes.append(f"{v} = {op}({x}{', ' + y if y else ''})")
        return v

    def build(self):
        text = f"g (float[N,6] x) => (float[N,6] {self.values[-1]}) {{ {' '.join(self.nodes)} }}"
        return model(text, **self.tensors)


@st.composite
def recipes(draw):
    return Recipe(draw)


# On a second device each new shape takes a compiler's time.
EXAMPLES = 8 if os.environ.get("LSUV_TEST_DEVICE") else 60


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    recipes(), st.sampled_from(["zero", "keep"]), st.sampled_from(["share", "untie", "skip"]), st.sampled_from([5, 32])
)
def test_any_graph(recipe, bias, tied, batch):
    before = recipe.build()
    exclude = ["fixed*"] if any("fixed" in node for node in recipe.nodes) else []
    result = initialize(before, X, bias=bias, tied=tied, batch_size=batch, exclude=exclude)
    lines = {layer.name: layer for layer in result.report.layers}
    found = variances(result.model, {"x": X}, {*recipe.layers, *recipe.tied}, reference=False)
    for value in recipe.layers:
        line = lines.get(value) or lines[value.replace("v", "m")]
        if line.status == "ok":
            assert abs(found[value] - 1) < 2e-3, (value, found)
        else:
            assert line.status in {"dead", "unreachable"}, line
    uses = recipe.tied
    if uses and tied == "untie":
        assert all(abs(found[v] - 1) < 2e-3 for v in uses if lines[v].status == "ok")
    elif uses and (tied == "share" or len(uses) == 1):
        first = [v for v in uses if lines[v].variance_at_turn is not None]
        if first and lines[first[0]].status == "ok":
            assert abs(np.mean([found[v] for v in first]) - 1) < 2e-3
    fixed = [name for name in recipe.tensors if name[0] != "w" and name[0] != "b" and name != "tied"]
    assert all((tensor(result.model, name) == recipe.tensors[name]).all() for name in fixed)
    if tied != "untie" and bias == "keep":
        assert unchanged_but(before, result.model, "tied", *recipe.layers.values())


OPTIONS = [
    {"bias": "center"},
    {"scale": "channel"},
    {"scale": "channel", "bias": "keep"},
    {"scale": "channel", "bias": "center"},
    {"residual": "bounded"},
    {"residual": "bounded", "bias": "center", "scale": "channel"},
]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipes(), st.sampled_from(OPTIONS), st.sampled_from(TIED), st.sampled_from([5, 32]))
def test_any_graph_with_centred_layers_channels_and_bounded_streams(recipe, options, tied, batch):
    """A layer that is called ok has its target, as a whole or in every live channel, and mean 0 if it is centred."""
    exclude = ["fixed*"] if any("fixed" in node for node in recipe.nodes) else []
    result = initialize(recipe.build(), X, tied=tied, batch_size=batch, exclude=exclude, **options)
    lines = {layer.name: layer for layer in result.report.layers}
    found = values(result.model, {"x": X}, {*recipe.layers, *recipe.tied})
    for value in {*recipe.layers, *(recipe.tied if tied == "untie" else ())}:
        line = lines.get(value) or lines[value.replace("v", "m")]
        if line.status != "ok":
            assert line.status in {"dead", "unreachable"}, line
            continue
        means, spread = found[value].mean(axis=0), found[value].var(axis=0)
        if line.channels is not None and line.channels.least_scale is not None:
            live = np.sort(spread)[line.channels.dead :]
            assert np.abs(live / line.target - 1).max() < 2e-3, (value, spread)
        else:
            assert abs(found[value].var() / line.target - 1) < 2e-3, (value, line)
        if "bias centred" in line.notes:
            assert np.abs(means).max() < 2e-3 * np.sqrt(line.target), (value, means)
