"""Build the networks of "All you need is a good init" (and a few more) as ONNX files.

    python sample_models/build.py --list
    python sample_models/build.py fitnet4 --activation relu -o fitnet4_relu.onnx
    python sample_models/build.py --kept

From Python: `build("fitnet4", activation="relu")` returns the ModelProto.

The weights are what deep nets were started with before there were better ways: Gaussian noise with standard
deviation 0.01, biases zero. In the deep ones next to nothing of the input is left at the last layer.

The FitNets are those of the paper's Table 1 and, where the table is silent, of the authors' Caffe definitions
(github.com/ducha-aiki/LSUVinit, examples/lsuv). Dropout is left out: these are inference graphs. So is the
softmax: the output is what the last layer gives, because that is what LSUV scales.
"""

from __future__ import annotations

import argparse
import inspect
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
WEIGHT_STD = 0.01
OPSET = 13
LAYER_NORM_OPSET = 17  # the first opset with LayerNormalization
# The oldest IR for opset 17. Left to itself, onnx writes a newer one than onnxruntime reads.
IR_VERSION = 8

ELEMENTWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("Relu", {}),
    "vlrelu": ("LeakyRelu", {"alpha": 0.333}),
    "tanh": ("Tanh", {}),
    "sigmoid": ("Sigmoid", {}),
}
ACTIVATIONS = ("maxout", *ELEMENTWISE)
CONV_PIECES = 2
LINEAR_PIECES = 5


# --- A thin layer over onnx.helper ---


@dataclass(frozen=True)
class Value:
    """A value in the graph. Its shape leaves out the batch dimension."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Net:
    """A graph under construction. A node's output carries the node's name."""

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        shape: tuple[int, ...],
        output: str = "",
        **attributes: Any,
    ) -> Value:
        value = Value(output or name, shape)
        self.nodes.append(helper.make_node(op, inputs, [value.name], name=name, **attributes))
        return value

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def gaussian(self, name: str, shape: tuple[int, ...]) -> str:
        # One stream per weight: no weight depends on which other layers there are. RandomState because numpy
        # promises never to change its numbers, and the kept files must be rebuilt byte for byte.
        random = np.random.RandomState([self.seed, zlib.crc32(name.encode())])
        return self.constant(name, (WEIGHT_STD * random.standard_normal(shape)).astype(np.float32))

    def filled(self, name: str, size: int, value: float) -> str:
        return self.constant(name, np.full(size, value, np.float32))

    def conv(
        self,
        x: Value,
        name: str,
        width: int,
        kernel: int,
        *,
        pad: int = 0,
        stride: int = 1,
        group: int = 1,
        bias: bool = True,
    ) -> Value:
        channels, height, _ = x.shape
        inputs = [x.name, self.gaussian(f"{name}.weight", (width, channels // group, kernel, kernel))]
        if bias:
            inputs.append(self.filled(f"{name}.bias", width, 0.0))
        size = (height + 2 * pad - kernel) // stride + 1
        return self.node(
            "Conv",
            inputs,
            name,
            (width, size, size),
            kernel_shape=[kernel, kernel],
            pads=[pad] * 4,
            strides=[stride] * 2,
            group=group,
        )

    def inner_product(self, x: Value, name: str, width: int, output: str = "") -> Value:
        """Caffe's InnerProduct: flattens an image by itself."""
        if len(x.shape) > 1:
            x = self.node("Flatten", [x.name], f"{name}.flatten", (math.prod(x.shape),), axis=1)
        weight = self.gaussian(f"{name}.weight", (width, x.shape[0]))
        bias = self.filled(f"{name}.bias", width, 0.0)
        return self.node("Gemm", [x.name, weight, bias], name, (width,), output, transB=1)

    def matmul(self, x: Value, name: str, width: int) -> Value:
        """The inner product as transformers export it: MatMul, then Add."""
        weight = self.gaussian(f"{name}.weight", (x.shape[-1], width))
        bias = self.filled(f"{name}.bias", width, 0.0)
        y = self.node("MatMul", [x.name, weight], name, (*x.shape[:-1], width))
        return self.node("Add", [y.name, bias], f"{name}.add", y.shape)

    def pool(self, x: Value, name: str, kernel: int, stride: int, *, pad: int = 0, op: str = "MaxPool") -> Value:
        """Pooling as in Caffe, which rounds sizes up."""
        channels, height, _ = x.shape
        steps, rest = divmod(height + 2 * pad - kernel, stride)
        size = steps + 1 + (rest > 0)
        attributes: dict[str, Any] = {
            "kernel_shape": [kernel] * 2,
            "pads": [pad] * 4,
            "strides": [stride] * 2,
        }
        if rest:  # said only where it matters: not every importer knows ceil_mode
            attributes["ceil_mode"] = 1
        return self.node(op, [x.name], name, (channels, size, size), **attributes)

    def lrn(self, x: Value, name: str) -> Value:
        return self.node("LRN", [x.name], name, x.shape, size=5, alpha=1e-4, beta=0.75, bias=1.0)

    def add(self, x: Value, y: Value, name: str) -> Value:
        if x.shape != y.shape:
            raise ValueError(f"{name}: cannot add {x.name} {x.shape} and {y.name} {y.shape}")
        return self.node("Add", [x.name, y.name], name, x.shape)

    def batch_norm(self, x: Value, name: str) -> Value:
        """Batch normalization that has seen no data yet: mean 0, variance 1, so it passes its input on."""
        start = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        inputs = [self.filled(f"{name}.{key}", x.shape[0], value) for key, value in start.items()]
        return self.node("BatchNormalization", [x.name, *inputs], name, x.shape, epsilon=1e-5)

    def layer_norm(self, x: Value, name: str) -> Value:
        inputs = [
            self.filled(f"{name}.weight", x.shape[-1], 1.0),
            self.filled(f"{name}.bias", x.shape[-1], 0.0),
        ]
        return self.node("LayerNormalization", [x.name, *inputs], name, x.shape, axis=-1, epsilon=1e-12)

    def relu(self, x: Value) -> Value:
        return self.node("Relu", [x.name], f"{x.name}.relu", x.shape)

    def maxout(self, x: Value, name: str, pieces: int) -> Value:
        """Maxout: the largest of `pieces` equal groups of channels.

        Caffe's files have a convolution per piece; here one convolution computes them all. Of the ways to
        take the largest, Split and a Max of two are what importers know best: ncnn's has no ReduceMax, and of
        a larger Max it silently drops all but the first two.
        """
        width = x.shape[0] // pieces
        names = [f"{name}.piece{i + 1}" for i in range(pieces)]
        # The sizes could be left out where they are equal, but pnnx then makes an empty Split.
        sizes = self.constant(f"{name}.sizes", np.full(pieces, width, np.int64))
        self.nodes.append(helper.make_node("Split", [x.name, sizes], names, name=f"{name}.split", axis=1))
        parts = [Value(piece, (width, *x.shape[1:])) for piece in names]
        counter = iter(range(2, pieces + 1))

        def larger(left: Value, right: Value) -> Value:
            return self.node("Max", [left.name, right.name], f"{name}.max{next(counter)}", left.shape)

        return reduce(larger, parts)

    def model(
        self, name: str, data: onnx.ValueInfoProto, outputs: Sequence[Value], opset: int = OPSET
    ) -> onnx.ModelProto:
        results = [helper.make_tensor_value_info(v.name, TensorProto.FLOAT, ["N", *v.shape]) for v in outputs]
        graph = helper.make_graph(self.nodes, name, [data], results, self.initializers)
        return helper.make_model(
            graph,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", opset)],
            producer_name="lsuv sample models",
        )


def images(*shape: int) -> tuple[Value, onnx.ValueInfoProto]:
    return Value("data", shape), helper.make_tensor_value_info("data", TensorProto.FLOAT, ["N", *shape])


# --- FitNets ---


@dataclass(frozen=True)
class Block:
    """Some 3x3 convolutions, then a max pooling."""

    widths: tuple[int, ...]
    pool: int
    stride: int


@dataclass(frozen=True)
class Style:
    """What a FitNet puts around its layers."""

    activation: str
    batch_norm: str | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"no activation {self.activation!r}; there are {', '.join(ACTIVATIONS)}")
        if self.batch_norm not in (None, "before", "after"):
            raise ValueError(f"batch_norm is 'before' or 'after' the non-linearity, not {self.batch_norm!r}")

    def pieces(self, of_maxout: int) -> int:
        """How many outputs a layer computes for each one that leaves its non-linearity."""
        return of_maxout if self.activation == "maxout" else 1


def nonlinearity(net: Net, y: Value, style: Style, pieces: int, shortcut: Value | None = None) -> Value:
    """What follows the layer whose output is y: batch norm, the sum with a shortcut, the activation."""
    layer = y.name
    if style.batch_norm == "before":
        y = net.batch_norm(y, f"{layer}.bn")
    if style.activation == "maxout":
        y = net.maxout(y, layer, pieces)
        # The sum comes before the non-linearity, so x joins every piece: max(a + x, b + x) = max(a, b) + x.
        if shortcut:
            y = net.add(y, shortcut, f"{layer}.sum")
    else:
        if shortcut:
            y = net.add(y, shortcut, f"{layer}.sum")
        op, attributes = ELEMENTWISE[style.activation]
        y = net.node(op, [y.name], f"{layer}.{style.activation}", y.shape, **attributes)
    if style.batch_norm == "after":
        y = net.batch_norm(y, f"{layer}.bn")
    return y


# The paper's parameter counts, 250K for FitNet-1 and 2.5M for FitNet-4, are those of an fc-500 with two
# pieces (249,576 and 2,544,712 weights). Its Table 1 and the authors' Caffe files say five pieces, and so do
# we: 348,694 and 2,742,102 parameters. Without maxout FitNet-4 has 1,276,806; the paper says 1.2M.
FITNET1 = (Block((16, 16, 16), 2, 2), Block((32, 32, 32), 2, 2), Block((48, 48, 64), 8, 1))

# Table 1 lists 5 + 5 + 5 convolutions, but the paper's tables of standard deviations name 5 + 6 + 6 (conv11
# to conv36; "17 layers"), and the authors' Caffe files have those.
FITNET4 = (Block((32, 32, 32, 48, 48), 2, 2), Block((80,) * 6, 2, 2), Block((128,) * 6, 8, 1))

# The first block has the widths of Table 1's FitResNet-4 column, the others six convolutions as in FitNet-4.
# 2,765,174 parameters with maxout; the paper says 2.5M (again with two pieces: 2,567,752 weights).
FITRESNET4 = (Block((32, 32, 48, 48, 48), 2, 2), *FITNET4[1:])

# Table 1 says 30K, but its layers make 21,426: all convolutions 3x3, padded by 1, and no hidden fc layer, as
# in the authors' Caffe file; sizes 28 -> 13 -> 6 -> 3. (FitNets' own has some 5x5 kernels and four pieces.)
FITNET_MNIST = (Block((16, 16), 4, 2), Block((16, 16), 4, 2), Block((12, 12), 2, 2))


def convolutions(net: Net, x: Value, blocks: Sequence[Block], style: Style, *, residual: bool = False) -> Value:
    """conv11, conv12, ..., pool1, conv21, ...

    Residual: "the output of each even convolutional layer is summed with the output of the previous
    non-linearity layer and then fed into the next non-linearity". The previous non-linearity is the one right
    before that convolution: what is added is the convolution's own input. With the widths of Table 1 the two
    sides of every such sum agree; reaching two layers back, as He et al. do, would add 3 channels to 32 and
    32 to 48.
    """
    pieces = style.pieces(CONV_PIECES)
    for b, block in enumerate(blocks, start=1):
        for i, width in enumerate(block.widths, start=1):
            y = net.conv(x, f"conv{b}{i}", width * pieces, 3, pad=1)
            x = nonlinearity(net, y, style, pieces, x if residual and i % 2 == 0 else None)
        x = net.pool(x, f"pool{b}", block.pool, block.stride)
    return x


def fitnet_cifar(
    name: str, blocks: Sequence[Block], style: Style, classes: int, seed: int, *, residual: bool = False
) -> onnx.ModelProto:
    """The convolutions, then fc-500 and the classifier.

    fc-500 is what the paper's tables of standard deviations call ip1: MSRA's 0.124 is sqrt(2/128), and
    OrthoNorm's 0.044 is 1/sqrt(500); no other layer has both. The classifier, which they leave out, is ip2.
    """
    net = Net(seed)
    x, data = images(3, 32, 32)
    x = convolutions(net, x, blocks, style, residual=residual)
    pieces = style.pieces(LINEAR_PIECES)
    x = nonlinearity(net, net.inner_product(x, "ip1", 500 * pieces), style, pieces)
    return net.model(name, data, [net.inner_product(x, "ip2", classes, "logits")])


def fitnet1(
    *, activation: str = "maxout", batch_norm: str | None = None, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """FitNet-1 for 32x32 colour images: 11 layers, 349K parameters with maxout, 128K without."""
    return fitnet_cifar("FitNet-1", FITNET1, Style(activation, batch_norm), classes, seed)


def fitnet4(
    *, activation: str = "maxout", batch_norm: str | None = None, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """FitNet-4 for 32x32 colour images: 19 layers, 2.74M parameters with maxout, 1.28M without."""
    return fitnet_cifar("FitNet-4", FITNET4, Style(activation, batch_norm), classes, seed)


def fitresnet4(
    *, activation: str = "maxout", batch_norm: str | None = None, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """FitResNet-4: sums around the even convolutions; 2.77M parameters with maxout, 1.29M without."""
    return fitnet_cifar("FitResNet-4", FITRESNET4, Style(activation, batch_norm), classes, seed, residual=True)


def fitnet_mnist(
    *, activation: str = "maxout", batch_norm: str | None = None, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """FitNet-MNIST for 28x28 grey images: 7 layers, 21K parameters with maxout, 11K without."""
    net = Net(seed)
    x, data = images(1, 28, 28)
    x = convolutions(net, x, FITNET_MNIST, Style(activation, batch_norm))
    return net.model("FitNet-MNIST", data, [net.inner_product(x, "ip1", classes, "logits")])


def chain(
    *,
    depth: int = 20,
    width: int = 16,
    size: int = 32,
    activation: str = "relu",
    classes: int = 10,
    seed: int = 0,
) -> onnx.ModelProto:
    """A chain of `depth` 3x3 convolutions at one resolution, then a classifier: for sweeps over depth."""
    net = Net(seed)
    style = Style(activation)
    pieces = style.pieces(CONV_PIECES)
    x, data = images(3, size, size)
    for i in range(1, depth + 1):
        x = nonlinearity(net, net.conv(x, f"conv{i}", width * pieces, 3, pad=1), style, pieces)
    x = net.pool(x, "pool", size, 1)
    return net.model("chain", data, [net.inner_product(x, "ip1", classes, "logits")])


# --- ImageNet networks ---


def caffenet(*, classes: int = 1000, seed: int = 0) -> onnx.ModelProto:
    """CaffeNet: AlexNet with pooling before normalization; grouped convolutions and LRN, 61.0M parameters."""
    net = Net(seed)
    x, data = images(3, 227, 227)
    x = net.relu(net.conv(x, "conv1", 96, 11, stride=4))
    x = net.lrn(net.pool(x, "pool1", 3, 2), "norm1")
    x = net.relu(net.conv(x, "conv2", 256, 5, pad=2, group=2))
    x = net.lrn(net.pool(x, "pool2", 3, 2), "norm2")
    x = net.relu(net.conv(x, "conv3", 384, 3, pad=1))
    x = net.relu(net.conv(x, "conv4", 384, 3, pad=1, group=2))
    x = net.relu(net.conv(x, "conv5", 256, 3, pad=1, group=2))
    x = net.pool(x, "pool5", 3, 2)
    x = net.relu(net.inner_product(x, "fc6", 4096))
    x = net.relu(net.inner_product(x, "fc7", 4096))
    return net.model("CaffeNet", data, [net.inner_product(x, "fc8", classes, "logits")])


# Per inception module: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
INCEPTION = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def inception(net: Net, x: Value, key: str) -> Value:
    name = f"inception_{key}"
    one, reduce3, three, reduce5, five, projection = INCEPTION[key]

    def conv(x: Value, part: str, width: int, kernel: int = 1) -> Value:
        return net.relu(net.conv(x, f"{name}/{part}", width, kernel, pad=kernel // 2))

    branches = [
        conv(x, "1x1", one),
        conv(conv(x, "3x3_reduce", reduce3), "3x3", three, 3),
        conv(conv(x, "5x5_reduce", reduce5), "5x5", five, 5),
        conv(net.pool(x, f"{name}/pool", 3, 1, pad=1), "pool_proj", projection),
    ]
    channels = sum(branch.shape[0] for branch in branches)
    return net.node("Concat", [b.name for b in branches], f"{name}/output", (channels, *x.shape[1:]), axis=1)


def auxiliary(net: Net, x: Value, name: str, classes: int) -> Value:
    x = net.pool(x, f"{name}/ave_pool", 5, 3, op="AveragePool")
    x = net.relu(net.conv(x, f"{name}/conv", 128, 1))
    x = net.relu(net.inner_product(x, f"{name}/fc", 1024))
    return net.inner_product(x, f"{name}/classifier", classes)


def googlenet(*, aux: bool = False, classes: int = 1000, seed: int = 0) -> onnx.ModelProto:
    """GoogLeNet as in BVLC's Caffe: 7.0M parameters, 13.4M with the two auxiliary classifiers."""
    net = Net(seed)
    x, data = images(3, 224, 224)
    x = net.relu(net.conv(x, "conv1/7x7_s2", 64, 7, pad=3, stride=2))
    x = net.lrn(net.pool(x, "pool1/3x3_s2", 3, 2), "pool1/norm1")
    x = net.relu(net.conv(x, "conv2/3x3_reduce", 64, 1))
    x = net.relu(net.conv(x, "conv2/3x3", 192, 3, pad=1))
    x = net.pool(net.lrn(x, "conv2/norm2"), "pool2/3x3_s2", 3, 2)
    extra: list[Value] = []
    for key in INCEPTION:
        x = inception(net, x, key)
        if key in ("3b", "4e"):
            x = net.pool(x, f"pool{key[0]}/3x3_s2", 3, 2)
        if aux and key in ("4a", "4d"):
            extra.append(auxiliary(net, x, f"loss{len(extra) + 1}", classes))
    x = net.pool(x, "pool5/7x7_s1", 7, 1, op="AveragePool")
    return net.model("GoogLeNet", data, [net.inner_product(x, "loss3/classifier", classes, "logits"), *extra])


def resnet50(*, fold_bn: bool = False, classes: int = 1000, seed: int = 0) -> onnx.ModelProto:
    """ResNet-50 as first published, stride in the 1x1: 25.6M parameters, with or without batch norm."""
    net = Net(seed)

    def conv(x: Value, name: str, width: int, kernel: int, stride: int = 1) -> Value:
        # A batch norm that has seen no data folds into a convolution with a zero bias.
        y = net.conv(x, name, width, kernel, pad=kernel // 2, stride=stride, bias=fold_bn)
        return y if fold_bn else net.batch_norm(y, f"{name}.bn")

    def bottleneck(x: Value, name: str, width: int, stride: int) -> Value:
        shortcut = conv(x, f"{name}_branch1", 4 * width, 1, stride) if name.endswith("a") else x
        y = net.relu(conv(x, f"{name}_branch2a", width, 1, stride))
        y = net.relu(conv(y, f"{name}_branch2b", width, 3))
        return net.relu(net.add(conv(y, f"{name}_branch2c", 4 * width, 1), shortcut, name))

    x, data = images(3, 224, 224)
    x = net.pool(net.relu(conv(x, "conv1", 64, 7, 2)), "pool1", 3, 2)
    for stage, letters in {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}.items():
        for letter in letters:
            stride = 2 if letter == "a" and stage > 2 else 1
            x = bottleneck(x, f"res{stage}{letter}", 64 * 2 ** (stage - 2), stride)
    x = net.pool(x, "pool5", 7, 1, op="AveragePool")
    return net.model("ResNet-50", data, [net.inner_product(x, "fc1000", classes, "logits")])


# --- A transformer ---


def attention(net: Net, x: Value, name: str) -> Value:
    length, hidden = x.shape
    heads = max(1, hidden // 64)
    width = hidden // heads

    def by_head(part: str, perm: list[int]) -> Value:
        y = net.matmul(x, f"{name}.{part}", hidden)
        y = net.node("Reshape", [y.name, "attention.split"], f"{name}.{part}.heads", (length, heads, width))
        shape = tuple(y.shape[axis - 1] for axis in perm[1:])
        return net.node("Transpose", [y.name], f"{name}.{part}.transpose", shape, perm=perm)

    query = by_head("query", [0, 2, 1, 3])
    key = by_head("key", [0, 2, 3, 1])  # transposed, for the product with the query
    value = by_head("value", [0, 2, 1, 3])
    square = (heads, length, length)
    scores = net.node("MatMul", [query.name, key.name], f"{name}.scores", square)
    scores = net.node("Div", [scores.name, "attention.scale"], f"{name}.scores.scaled", square)
    weights = net.node("Softmax", [scores.name], f"{name}.softmax", square, axis=-1)
    y = net.node("MatMul", [weights.name, value.name], f"{name}.context", (heads, length, width))
    y = net.node("Transpose", [y.name], f"{name}.context.transpose", (length, heads, width), perm=[0, 2, 1, 3])
    y = net.node("Reshape", [y.name, "attention.join"], f"{name}.context.join", x.shape)
    return net.matmul(y, f"{name}.output", hidden)


def gelu(net: Net, x: Value, name: str) -> Value:
    """x * (1 + erf(x / sqrt(2))) / 2, spelled out: the Gelu operator is younger than opset 17."""
    y = net.node("Div", [x.name, "gelu.sqrt2"], f"{name}.div", x.shape)
    y = net.node("Erf", [y.name], f"{name}.erf", x.shape)
    y = net.node("Add", [y.name, "gelu.one"], f"{name}.add", x.shape)
    y = net.node("Mul", [x.name, y.name], f"{name}.mul", x.shape)
    return net.node("Mul", [y.name, "gelu.half"], name, x.shape)


def bert(
    *,
    hidden: int = 768,
    layers: int = 12,
    length: int = 128,
    vocabulary: int = 30522,
    classes: int = 2,
    seed: int = 0,
) -> onnx.ModelProto:
    """A BERT-like encoder and classifier from token ids: 109.2M parameters at its default size.

    All tokens count, and all are of one type: there is no attention mask and no token type embedding.
    """
    net = Net(seed)
    heads = max(1, hidden // 64)
    if hidden % heads:
        raise ValueError(f"hidden must be a multiple of 64 or less than 128, not {hidden}")
    net.constant("attention.split", np.array([0, 0, heads, hidden // heads], np.int64))
    net.constant("attention.join", np.array([0, 0, hidden], np.int64))
    net.constant("attention.scale", np.array(math.sqrt(hidden // heads), np.float32))
    for name, value in (("sqrt2", math.sqrt(2)), ("one", 1.0), ("half", 0.5)):
        net.constant(f"gelu.{name}", np.array(value, np.float32))

    shape = (length, hidden)
    words = net.gaussian("embeddings.word.weight", (vocabulary, hidden))
    places = net.gaussian("embeddings.position.weight", (length, hidden))
    x = net.node("Gather", [words, "input_ids"], "embeddings.word", shape)
    x = net.node("Add", [x.name, places], "embeddings.sum", shape)
    x = net.layer_norm(x, "embeddings.norm")
    for i in range(layers):
        name = f"layer{i}"
        x = net.layer_norm(net.add(attention(net, x, f"{name}.attention"), x, f"{name}.sum1"), f"{name}.norm1")
        y = gelu(net, net.matmul(x, f"{name}.intermediate", 4 * hidden), f"{name}.gelu")
        y = net.matmul(y, f"{name}.output", hidden)
        x = net.layer_norm(net.add(y, x, f"{name}.sum2"), f"{name}.norm2")
    net.constant("pooler.index", np.array(0, np.int64))
    x = net.node("Gather", [x.name, "pooler.index"], "pooler.first", (hidden,), axis=1)
    x = net.inner_product(x, "pooler", hidden)
    x = net.node("Tanh", [x.name], "pooler.tanh", x.shape)
    data = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["N", length])
    return net.model("BERT", data, [net.inner_product(x, "classifier", classes, "logits")], LAYER_NORM_OPSET)


# --- By name, and from the command line ---

NETWORKS: dict[str, Callable[..., onnx.ModelProto]] = {
    network.__name__: network
    for network in (fitnet1, fitnet4, fitresnet4, fitnet_mnist, caffenet, googlenet, resnet50, bert, chain)
}

# The small files that lie beside this script.
KEPT: dict[str, tuple[str, dict[str, object]]] = {
    "fitnet1_relu.onnx": ("fitnet1", {"activation": "relu"}),
    "fitnet_mnist_maxout.onnx": ("fitnet_mnist", {"activation": "maxout"}),
}


def options_of(name: str) -> list[str]:
    if name not in NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    return list(inspect.signature(NETWORKS[name]).parameters)


def build(name: str, **options: object) -> onnx.ModelProto:
    """The network of that name. Its options are the keyword arguments of the function of that name above."""
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(known)}")
    return NETWORKS[name](**options)


def parameter_count(model: onnx.ModelProto) -> int:
    """The number of trainable values: weights and biases, not running statistics or other constants."""
    parameters = (t for t in model.graph.initializer if t.name.endswith((".weight", ".bias")))
    return sum(math.prod(t.dims) for t in parameters)


def write(model: onnx.ModelProto, path: Path) -> None:
    data = model.SerializeToString(deterministic=True)
    path.write_bytes(data)
    print(f"{path.name}: {parameter_count(model):,} parameters, {len(data):,} bytes")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Build sample networks as ONNX files.",
        epilog="Each network has only some of the options: see --list.",
        # An option that was not given is not passed on, so that each network's own defaults stand.
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("name", nargs="?", default=None, choices=NETWORKS, help="the network to build")
    parser.add_argument("-o", "--output", type=Path, help="the file to write, else named after the network")
    parser.add_argument("--list", action="store_true", help="say which networks there are, and their options")
    parser.add_argument("--kept", action="store_true", help="rebuild the files that lie beside this script")
    options = parser.add_argument_group("options of the networks")
    options.add_argument("--activation", choices=ACTIVATIONS)
    options.add_argument("--batch-norm", choices=("before", "after"), help="of the non-linearity")
    options.add_argument("--aux", action="store_true", help="with auxiliary classifiers")
    options.add_argument("--fold-bn", action="store_true", help="without batch normalization")
    for name in ("depth", "width", "size", "hidden", "layers", "length", "vocabulary", "classes", "seed"):
        options.add_argument(f"--{name}", type=int, metavar="N")
    return parser


def describe_networks() -> None:
    for name, network in NETWORKS.items():
        summary = (network.__doc__ or "").splitlines()[0]
        options = " ".join(f"--{option.replace('_', '-')}" for option in options_of(name))
        print(f"{name:<13} {summary}\n{'':<13} {options}")


def build_kept() -> None:
    for file, (name, options) in KEPT.items():
        write(build(name, **options), HERE / file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    options = vars(parser.parse_args(arguments))
    if options.pop("list", False):
        return describe_networks()
    if options.pop("kept", False):
        return build_kept()
    name = options.pop("name")
    if name is None:
        parser.error("which network? See --list")
    chosen = [value for value in options.values() if isinstance(value, str)]
    output = options.pop("output", Path("_".join([name, *chosen]) + ".onnx"))
    try:
        model = build(name, **options)
    except ValueError as error:
        parser.error(str(error))
    return write(model, output)


if __name__ == "__main__":
    main()
