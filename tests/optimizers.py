# mypy: disable-error-code="arg-type"
"""Which of onnxruntime's optimizers change what a graph computes? Random small graphs, optimized against unoptimized.

    python tests/optimizers.py --seconds 120 [--seed S]

A graph is a short chain of layers and of operators that commute with a scale, on odd shapes (axes of length 1,
vectors), with weights, factors and biases as constants. The optimizers that lsuv turns off are off here too, so that a
finding is one that lsuv would meet. For each, the optimizers without which it goes away are named.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from lsuv_cli.scaling import runtime

ort.set_default_logger_severity(4)
ALLOWED = 1e-3  # relative difference
SUSPECTS = [
    "ConstantFolding", "CommonSubexpressionElimination", "MatMulAddFusion", "MatmulTransposeFusion",
    "GemmActivationFusion",
    "ConvActivationFusion", "ConvAddActivationFusion", "ConvBNFusion", "ConvMulFusion", "ConvAddFusion", "PadFusion",
    "MatMulBNFusion", "ReshapeFusion", "TransposeOptimizer", "NchwcTransformer", "NhwcTransformer", "GemmSumFusion",
    "ConstantSharing", "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "NoopElimination",
    "ReluClipFusion", "LayerNormFusion", "BiasDropoutFusion", "EliminateDropout", "MatMulScaleFusion",
    "GemmTransposeFusion", "GeluFusion",
]  # fmt: skip
SIZES = [1, 1, 2, 3, 4, 7, 8]
ONE = ["Relu", "Neg", "Abs", "Identity", "LeakyRelu", "Tanh", "Sigmoid", "Softmax", "Flatten", "GlobalAveragePool",
       "GlobalMaxPool", "ReduceMean", "ReduceMax", "ReduceL2"]  # fmt: skip


class Chain:
    """One random graph."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.last = rng, "x"
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.shape = tuple(self.pick(SIZES) for _ in range(self.pick([1, 2, 2, 3, 4, 4])))
        self.x = rng.standard_normal(self.shape).astype(np.float32)
        self.opset = self.pick([11, 13, 17, 18, 21])
        self.names = ["x"]

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def constant(self, *shape: int) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(self.rng.standard_normal(shape).astype(np.float32), name))
        return name

    def numbers(self, *values: int) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Add a node if the graph still runs with it."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        try:
            (value,) = self.run(self.model([name]), optimized=False)
        except Exception:
            self.nodes.pop()
            return
        if not value.size:  # onnxruntime's product over an axis of length 0 is memory as it was, optimized or not
            self.nodes.pop()
            return
        self.last, self.shape = name, value.shape
        self.names.append(name)

    def step(self) -> None:
        """A layer, an operator that commutes with a scale, or one that fusions look for."""
        y, s, r = self.last, self.shape, len(self.shape)
        kind = self.pick(["matmul", "matmul", "left", "gemm", "conv", "conv", "factor", "shift", "one", "one",
                          "transpose", "reshape", "pair", "norm", "pad", "slice", "squeeze", "twice",
                          "dropout"])  # fmt: skip
        wide = self.pick(SIZES)
        if kind == "matmul":
            self.add("MatMul", y, self.constant(*self.pick([(s[-1] if r else 1, wide), (s[-1] if r else 1,)])))
        elif kind == "left" and r > 1:
            self.add("MatMul", self.constant(*self.pick([(wide, s[-2]), (s[-2],)])), y)
        elif kind == "gemm" and r == 2:
            bias = self.constant(*self.pick([(wide,), (1,), (), (1, wide), (s[0], 1)]))
            self.add(
                "Gemm", y, self.constant(s[1], wide), bias, alpha=self.pick([1.0, 0.5]), beta=self.pick([1.0, 2.0])
            )
        elif kind == "conv" and r > 2:
            group = self.pick([1, s[1]])
            kernel = [self.pick([1, min(2, d), min(3, d)]) for d in s[2:]]
            added = [self.constant(group * 2)] if self.pick([0, 1]) else []
            self.add("Conv", y, self.constant(group * 2, s[1] // group, *kernel), *added, group=group)
        elif kind in {"factor", "shift"} and r:
            shape = self.pick(
                [(), (1,), s[-1:], (1,) * (r - 1) + s[-1:], (s[1], *[1] * (r - 2)) if r > 1 else (1,), (1, *s)]
            )
            inputs = [y, self.constant(*shape)]
            self.add(
                self.pick(["Mul", "Div"] if kind == "factor" else ["Add", "Sub"]),
                *(inputs if self.pick([0, 1]) else inputs[::-1]),
            )
        elif kind == "one":
            self.add(self.pick(ONE), y)
        elif kind == "transpose" and r:
            self.add("Transpose", y, perm=[int(k) for k in self.rng.permutation(r)])
        elif kind == "reshape":
            self.add("Reshape", y, self.numbers(*self.pick([(-1,), (1, -1), (0, -1), (-1, 1), (0, 0, -1)])))
        elif kind == "pair":
            self.add(self.pick(["Add", "Mul", "Sub", "Max", "MatMul"]), y, self.pick(self.names))
        elif kind == "norm" and r > 1:
            gamma, beta, mean, variance = (self.constant(s[1]) for _ in range(4))
            self.add("Abs", variance)
            self.add("BatchNormalization", y, gamma, beta, mean, self.names[-1])
        elif kind == "pad" and r:
            self.add("Pad", y, self.numbers(*[self.pick([0, 1]) for _ in range(2 * r)]))
        elif kind == "slice" and r:
            self.add("Slice", y, self.numbers(0), self.numbers(self.pick([1, 2**40, -1])), self.numbers(r - 1))
        elif kind == "squeeze":
            self.add(self.pick(["Squeeze", "Unsqueeze"]), y, self.numbers(self.pick([0, -1])))
        elif kind == "twice":
            self.add("Add", y, y)
        elif kind == "dropout":
            ratio, training = self.constant(), f"c{len(self.tensors)}"
            self.tensors[-1].CopyFrom(numpy_helper.from_array(np.array(0.4, np.float32), ratio))
            self.tensors.append(numpy_helper.from_array(np.array(True), training))
            self.add("Dropout", y, ratio, training, seed=len(self.nodes))

    def model(self, outputs: list[str]) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", 1, self.pick_declared())
        graph = helper.make_graph(self.nodes, "g", [x], [onnx.ValueInfoProto(name=o) for o in outputs], self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def pick_declared(self) -> list[Any]:
        return ["N", *self.x.shape[1:]] if len(self.nodes) % 2 else list(self.x.shape)

    def run(self, model: onnx.ModelProto, optimized: bool, off: Any = ()) -> list[Any]:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        if not optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(off)
        )
        return list(session.run(None, {"x": self.x}))


def differ(one: list[Any], other: list[Any]) -> bool:
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return True
        if a.size and not np.allclose(a, b, rtol=ALLOWED, atol=ALLOWED * float(np.abs(a).max()), equal_nan=True):
            return True
    return False


def examine(seed: int, number: int) -> str:
    """What is wrong with one random graph; empty if nothing is."""
    chain = Chain(np.random.default_rng([seed, number]))
    for _ in range(chain.pick([2, 3, 4, 6])):
        chain.step()
    if not chain.nodes:
        return ""
    # Two graphs: with the last value as the only output, and with one more that fusions must not remove.
    for outputs in ([chain.last], list(dict.fromkeys([chain.last, chain.pick(chain.names[1:])]))):
        model = chain.model(outputs)
        truth = chain.run(model, optimized=False)
        if not all(np.isfinite(a).all() for a in truth if a.dtype.kind == "f"):
            continue
        off = runtime._broken(model)
        try:
            if not differ(truth, chain.run(model, True, off)):
                continue
            what = "other values"
        except Exception as problem:
            what = f"does not load: {' '.join(str(problem).split())[:150]}"
        cured = []
        for name in SUSPECTS:
            try:
                if not differ(truth, chain.run(model, True, [*off, name])):
                    cured.append(name)
            except Exception:
                continue
        return f"{number} {what}; gone without {cured}: {[n.op_type for n in chain.nodes]} {chain.x.shape} {outputs}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimizers of onnxruntime that change what a graph computes.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    end, number, found = time.time() + asked.seconds, 0, 0
    with np.errstate(all="ignore"):
        while time.time() < end:
            told = examine(asked.seed, number)
            number += 1
            if told:
                found += 1
                print(told, flush=True)
    print(f"{number} graphs, {found} computed otherwise")


if __name__ == "__main__":
    main()
