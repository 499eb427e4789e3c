"""Networks of any depth for pages: a plain chain, a residual network, a transformer; and a report as of such a one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from helpers import normal
from lsuv_cli import Report
from lsuv_cli.details import BINS, Details, Histogram, LayerDetails, OutlineNode
from lsuv_cli.report import ChannelsReport, LayerReport, Status, SumReport

BELL = np.exp(-(np.linspace(-3, 3, BINS) ** 2) / 2)
BELL /= BELL.sum()


class _Network:
    """Nodes and tensors, added one after another."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def weight(self, name: str, *shape: int, std: float = 0.1) -> str:
        array = normal(*shape, seed=len(self.tensors)) * np.float32(std)
        self.tensors.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def conv(self, x: str, name: str, inside: int, out: int, size: int = 3) -> str:
        weight = self.weight(f"{name}.weight", out, inside, size, size)
        return self.add("Conv", [x, weight], name, pads=[size // 2] * 4)

    def linear(self, x: str, name: str, inside: int, out: int) -> str:
        return self.add("MatMul", [x, self.weight(f"{name}.weight", inside, out)], name)

    def model(self, x: list[int], y: str) -> onnx.ModelProto:
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *x])
        made = onnx.ValueInfoProto(name=y)
        made.type.tensor_type.elem_type = TensorProto.FLOAT
        graph = helper.make_graph(self.nodes, "g", [given], [made], self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def chain(layers: int) -> onnx.ModelProto:
    """Inner products with a ReLU behind each."""
    net, x = _Network(), "x"
    for k in range(layers):
        x = net.add("Relu", [net.linear(x, f"fc{k}", 8, 8)], f"relu{k}")
    return net.model([8], x)


def residual(blocks: int) -> onnx.ModelProto:
    """A stem, blocks of two convolutions (every sixth with one more beside them), and a classifier."""
    net = _Network()
    x = net.add("Relu", [net.conv("x", "/stem/conv/Conv", 3, 8)], "/stem/relu/Relu")
    for k in range(blocks):
        at = f"/layer{k // 8 + 1}/layer{k // 8 + 1}.{k % 8}"
        y = net.add("Relu", [net.conv(x, f"{at}/conv1/Conv", 8, 8)], f"{at}/relu/Relu")
        y = net.conv(y, f"{at}/conv2/Conv", 8, 8)
        beside = net.conv(x, f"{at}/downsample/Conv", 8, 8, size=1) if k % 6 == 0 else x
        x = net.add("Relu", [net.add("Add", [y, beside], f"{at}/Add")], f"{at}/relu_1/Relu")
    pooled = net.add("Flatten", [net.add("GlobalAveragePool", [x], "/pool")], "/flatten")
    return net.model([3, 12, 12], net.linear(pooled, "/fc/MatMul", 8, 10))


def transformer(blocks: int, width: int = 8) -> onnx.ModelProto:
    """An embedding, blocks of six inner products (Q, K, V, output, two in the MLP), and a head."""
    net = _Network()
    x = net.linear("x", "/model/embed/MatMul", width, width)
    for k in range(blocks):
        at = f"/model/layers.{k}/self_attn"
        q, keys, v = (net.linear(x, f"{at}/{name}_proj/MatMul", width, width) for name in "qkv")
        turned = net.add("Transpose", [keys], f"{at}/Transpose", perm=[0, 2, 1])
        scores = net.add("Softmax", [net.add("MatMul", [q, turned], f"{at}/MatMul")], f"{at}/Softmax", axis=-1)
        mixed = net.add("MatMul", [scores, v], f"{at}/MatMul_1")
        x = net.add("Add", [x, net.linear(mixed, f"{at}/o_proj/MatMul", width, width)], f"/model/layers.{k}/Add")
        at = f"/model/layers.{k}/mlp"
        y = net.add("Relu", [net.linear(x, f"{at}/up_proj/MatMul", width, width)], f"{at}/Relu")
        x = net.add("Add", [x, net.linear(y, f"{at}/down_proj/MatMul", width, width)], f"/model/layers.{k}/Add_1")
    return net.model([4, width], net.linear(x, "/lm_head/MatMul", width, width))


def synthetic(
    layers: int, seed: int = 0, command: str = "init", *, before: bool = True, channels: bool = False
) -> Report:
    """A report of a deep transformer with long names, as it is after a run with `--html`, in every field.

    Digits are random, so that nothing can be compressed that could not be in earnest.
    """
    rng = np.random.default_rng(seed)
    scaled = command == "init"
    entries, details, sums = [], [], []
    outline: list[OutlineNode] = []
    for k in range(layers):
        module = f"model.layers.{k // 6}.self_attn.{'qkvoud'[k % 6]}_proj"
        name = f"/{module.replace('.', '/')}/MatMul"
        draws = [math.exp(x) for x in rng.standard_normal(12)]
        entries.append(
            LayerReport(
                name, "MatMul", Status.OK, module, k // 2 + 1, f"{module}.weight", (768, 768), 1, "float32",
                "initializer",
                variance_given=draws[0] if scaled and before else None,
                variance_at_turn=draws[1] if scaled else None,
                scale=draws[2] if scaled else None,
                variance=draws[3], mean=draws[4], dead=float(f"{draws[6] / 99:.3f}"), weight_std=draws[5],
                channels=ChannelsReport(768, 0, *draws[6:11]) if channels else None,
                notes=("bias centred",) if channels else (),
            )
        )  # fmt: skip
        histograms = []
        for n in range(2):
            heights = rng.multinomial(8192, BELL) * 1000 // 8192  # counts of a bell curve, as weights and outputs have
            low, high = (float(f"{sign * draws[n]:.6g}") for sign in (-1, 1))
            histograms.append(Histogram(low, high, tuple(map(int, heights))))
        details.append(LayerDetails(float(f"{draws[4]:.6g}"), float(f"{draws[5]:.6g}"), *histograms))
        outline.append(OutlineNode("MatMul", k, (len(outline) - 1,)))
        if k % 2:
            outline.append(OutlineNode("Add", None, (len(outline) - 1, len(outline) - 3)))
            sum_name = f"/model/layers.{k // 6}/Add_{k % 6}"
            sums.append(SumReport(sum_name, 1, k // 2 + 1, layers // 2, name, draws[10], draws[11]))
    settings = {"target_variance": 1.0, "tol": 0.01, "rescale": True}
    whole = Details({"m.onnx": "0" * 64}, {"onnx": "1.0"}, tuple(details), tuple(outline))
    return Report(
        command, "0", "m.onnx", tuple(entries), settings=settings, samples=8, stages=layers // 2, details=whole,
        sums=tuple(sums),
    )  # fmt: skip
