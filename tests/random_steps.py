# mypy: disable-error-code="arg-type"
"""The operators between the layers of a random model, whether they carry a scale or not, and how a model grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper

from random_layers import (
    cancelled,
    chain,
    conv,
    conv_transpose,
    einsum,
    embedding,
    gemm,
    matmul,
    recurrent,
    spatial,
    unrolled,
)
from random_models import Builder, Rejected, Value

Step = Callable[[Builder], object]

PLAIN = [
    "Relu", "LeakyRelu", "Neg", "Abs", "Identity", "Tanh", "Sigmoid", "Erf", "Softplus", "Elu", "Selu", "Softsign",
    "HardSigmoid", "Softmax", "LogSoftmax", "Sin", "Atan", "Floor", "Sign", "GlobalAveragePool", "GlobalMaxPool",
    "GlobalLpPool", "Flatten", "Transpose", "MeanVarianceNormalization", "LpNormalization", "ThresholdedRelu",
    "HardSwish", "Mish", "Gelu", "Hardmax", "Ceil", "Celu", "Reciprocal",
]  # fmt: skip


def plain(b: Builder) -> None:
    op = b.pick(PLAIN)
    x = b.value()
    if op == "Reciprocal":
        x = b.op("Add", b.op("Abs", x), b.scalar(0.5))
    attributes = {"axis": -1} if op in {"Softmax", "LogSoftmax", "Hardmax"} and b.opset >= 13 else {}
    b.op(op, x, **attributes)


def prelu(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1)
    shape = (1,) if b.chance(0.5) else (x.shape[1], *[1] * (x.rank - 2))
    b.op("PRelu", x, b.store(np.abs(b.normal(*shape, spread=0.3))))


def pool(b: Builder) -> None:
    x = b.value(spatial)
    kernel = [b.number(1, min(3, s)) for s in x.shape[2:]]
    attributes: dict[str, object] = {"kernel_shape": kernel, "strides": [b.number(1, 2)] * len(kernel)}
    op = b.pick(["MaxPool", "AveragePool", "LpPool"])
    if op == "AveragePool":
        attributes |= {"count_include_pad": b.number(0, 1), "pads": [0] * (2 * len(kernel))}
    b.ops(op, x, outputs=2 if op == "MaxPool" and b.chance(0.1) else 1, **attributes)


def reshape(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1)
    form = b.pick(["Reshape", "dynamic", "Unsqueeze", "Squeeze", "Transpose", "Tile", "Expand", "Depth", "Space"])
    if form == "Reshape":
        b.reshape(x, *b.pick([(0, -1), (0, 0, -1), (0, -1, x.shape[-1]), (0, 1, -1)]))
    elif form == "dynamic":
        shape = b.op("Shape", x)
        first = b.op("Gather", shape, b.numbers(0), axis=0)
        b.op("Reshape", x, b.op("Concat", first, b.numbers(-1), axis=0))
    elif form == "Unsqueeze":
        b.with_axes("Unsqueeze", x, [b.number(1, x.rank)], 13)
    elif form == "Squeeze":
        b.with_axes("Squeeze", x, [b.pick([k for k, d in enumerate(x.shape) if d == 1 and k] or [1])], 13)
    elif form == "Transpose":
        b.op("Transpose", x, perm=[int(k) for k in b.rng.permutation(x.rank)])
    elif form == "Tile":
        b.op("Tile", x, b.numbers(*[1] * (x.rank - 1), 2))
    elif form == "Expand":
        b.op("Expand", x, b.numbers(2, *[1] * x.rank))
    else:
        b.op("DepthToSpace" if form == "Depth" else "SpaceToDepth", x, blocksize=2)


def reduce(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1)
    op = b.pick(["Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp"])
    axes = [b.pick([k for k in range(x.rank) if k or b.chance(0.2)] or [1])]
    b.with_axes(f"Reduce{op}", x, axes, 13 if op == "Sum" else 18, keepdims=b.number(0, 1))


def pair(b: Builder) -> None:
    """A sum, product or concatenation of two values; a residual, if they fit."""
    op = b.pick(["Add"] * 4 + ["Sub", "Sum", "Mean", "Max", "Min", "Concat", "Concat", "Mul", "MatMul"])
    x = b.value()
    if op == "MatMul":
        b.op(op, x, b.value(lambda v: v.rank > 1 and x.rank > 1 and v.shape[-2] == x.shape[-1]))
        return
    if op == "Concat":
        axis = x.rank - 1 if b.chance(0.5) else min(1, x.rank - 1)

        def same(v: Value) -> bool:
            return v.rank == x.rank and all(v.shape[k] == x.shape[k] for k in range(x.rank) if k != axis)

        b.op(op, x, b.value(same, 0.2), axis=axis)
        return
    b.op(op, x, b.value(lambda v: v.shape == x.shape, 0.2))


def constant_factor(b: Builder) -> None:
    x = b.value()
    size = b.pick([0.5, 2.0, -1.0, 255.0, 1e4, 1e-4, 1e-10])
    if size in (255.0, 1e4, 1e-10, 1e-4):
        b.draft.features.add("large factor")
    factor = b.scalar(size) if b.chance(0.7) else b.store(np.full(x.shape[-1:], size, b.dtype))
    b.op(b.pick(["Mul", "Div"]), x, factor)


def shift(b: Builder) -> None:
    x = b.value()
    b.op(b.pick(["Add", "Sub"]), x, b.scalar(b.pick([0.1, 1.0, 30.0])))


def pieces(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1 and v.shape[1] > 1)
    form = b.pick(["Split", "Split", "Slice", "Gather", "TopK", "ArgMax", "Compress", "CumSum", "GatherElements"])
    if form == "Split":
        b.split(x, 1, 2)
    elif form == "Slice":
        b.slice(x, b.number(0, x.rank - 1), b.pick([0, 1]), b.pick([-1, 1, 2**40]))
    elif form == "Gather":
        b.op("Gather", x, b.numbers(0, x.shape[1] - 1, 0) if b.chance(0.6) else b.store(np.array(0)), axis=1)
    elif form == "TopK":
        if b.opset >= 10:
            b.ops("TopK", x, b.numbers(1), outputs=2, axis=1)
        else:
            b.ops("TopK", x, outputs=2, axis=1, k=1)
    elif form == "ArgMax":
        b.op("Cast", b.op("ArgMax", x, axis=1), to=helper.np_dtype_to_tensor_dtype(np.dtype(b.dtype)))
    elif form == "Compress":
        # Rows whose mean is positive: none at all in some batch.
        means = b.reshape(b.with_axes("ReduceMean", b.op("Flatten", x), [1], 18, keepdims=0), -1)
        b.draft.features.add("rows that may be none")
        b.op("Compress", x, b.op("Greater", means, b.scalar(b.pick([0.0, 0.0, 1e9]))), axis=0)
    elif form == "CumSum":
        b.op("CumSum", x, b.store(np.array(x.rank - 1)))
    else:
        b.op("GatherElements", x, b.op("ArgMax", x, axis=1), axis=1)


def pad(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1)
    pads = [0] * (2 * x.rank)
    pads[x.rank - 1], pads[-1] = b.number(0, 1), b.number(0, 2)
    mode = b.pick(["constant", "constant", "reflect", "edge", *(["wrap"] if b.opset >= 19 else [])])
    if b.opset < 11:
        b.op("Pad", x, pads=pads, mode=mode, value=b.pick([0.0, 1.0]))
    else:
        fill = [b.scalar(b.pick([0.0, 1.0]))] if mode == "constant" and b.chance(0.5) else []
        b.op("Pad", x, b.numbers(*pads), *fill, mode=mode)


def resize(b: Builder) -> None:
    x = b.value(lambda v: v.rank in {3, 4})
    scales = b.store(np.array([1, 1, *[2.0] * (x.rank - 2)], np.float32))
    mode = b.pick(["nearest", "linear"])
    if b.opset >= 11:
        b.op("Resize", x, None if b.opset >= 13 else b.store(np.zeros(0, np.float32)), scales, mode=mode)
    else:
        b.op("Resize" if b.opset >= 10 else "Upsample", x, *([scales] if b.opset >= 9 else []), mode=mode)


def where(b: Builder) -> None:
    x = b.value()
    y = b.value(lambda v: v.shape == x.shape, 0.2)
    b.op("Where", b.op(b.pick(["Greater", "Less"]), x, b.scalar(0.0)), x, b.pick([y, b.scalar(0.0), b.scalar(-2.0)]))


def bounded(b: Builder) -> None:
    """Operators of limited range, or of values kept in one."""
    x = b.value()
    form = b.pick(["Clip", "Pow", "Exp", "Sqrt", "Log", "Cast", "Mod", "random"])
    if form == "Clip":
        b.op("Clip", x, b.scalar(-1.0), b.scalar(1.5)) if b.opset >= 11 else b.op("Clip", x, min=-1.0, max=1.5)
    elif form == "Pow":
        b.op("Pow", b.op("Tanh", x), b.scalar(b.pick([2.0, 3.0])))
    elif form == "Exp":
        b.op("Exp", b.op("Tanh", x))
    elif form in {"Sqrt", "Log"}:
        b.op(form, b.op("Add", b.op("Abs", x), b.scalar(0.1)))
    elif form == "Cast" and b.dtype == np.float32:
        half = b.op("Cast", x, to=10)
        b.draft.features.add("cast to float16")
        b.op("Cast", b.op("Relu", half) if b.chance(0.5) else half, to=1)
    elif form == "random" and b.chance(0.3):
        b.op("Add", x, b.op("RandomNormalLike", x, scale=0.5, **b.seed(float)))
        b.draft.features.add("random")


def normalization(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1 and min(v.shape) > 0)
    form = b.pick(["trained", "untrained", "untrained", "training", "Instance", "Layer", "Group", "LRN", "RMS"])
    c = x.shape[1]
    one, zero = np.ones(c, b.dtype), np.zeros(c, b.dtype)
    if form == "untrained":
        b.op("BatchNormalization", x, *map(b.store, (one, zero, zero, one)))
    elif form in {"trained", "training"}:
        arrays = [1 + b.normal(c, spread=0.2), b.normal(c, spread=0.2), b.normal(c, spread=0.2), one * 2]
        if form == "training":
            b.draft.features.add("batch statistics")
            b.ops("BatchNormalization", x, *map(b.store, arrays), outputs=3, training_mode=1)
        else:
            b.op("BatchNormalization", x, *map(b.store, arrays))
    elif form == "Instance":
        b.op("InstanceNormalization", x, b.store(one), b.store(zero))
    elif form == "Layer":
        b.op("LayerNormalization", x, b.store(np.ones(x.shape[-1], b.dtype)), axis=-1)
    elif form == "RMS":
        b.op("RMSNormalization", x, b.store(np.ones(x.shape[-1], b.dtype)), axis=-1)
    elif form == "Group":
        per = 1 if b.opset < 21 else c
        b.op("GroupNormalization", x, b.store(one[:per]), b.store(zero[:per]), num_groups=1)
    else:
        b.op("LRN", x, size=3)


def dropout(b: Builder) -> None:
    x = b.value()
    outputs = 2 if b.chance(0.3) else 1
    if b.opset < 12:
        b.ops("Dropout", x, outputs=outputs, ratio=0.4)
        return
    training = b.chance(0.35)
    if training:
        b.draft.features.add("dropout")
    inputs = [b.scalar(b.pick([0.1, 0.4])), b.store(np.array(True))] if training else [b.scalar(0.4)][: b.number(0, 1)]
    b.ops("Dropout", x, *inputs, outputs=outputs, **(b.seed(int) if training else {}))


STEPS: list[tuple[Step, int]] = [
    (conv, 14), (conv_transpose, 4), (gemm, 10), (matmul, 14), (einsum, 4), (embedding, 2), (recurrent, 1),
    (chain, 1), (unrolled, 1), (cancelled, 1),
    (plain, 10), (prelu, 1), (pool, 3), (reshape, 5), (reduce, 3), (pair, 10), (constant_factor, 3), (shift, 1),
    (pieces, 4), (pad, 2), (resize, 1), (where, 2), (bounded, 3), (normalization, 4), (dropout, 2),
]  # fmt: skip


def grow(b: Builder, steps: int) -> None:
    """Add nodes until there are enough, with at least one layer among them."""
    frequencies = np.array([frequency for _, frequency in STEPS], float)
    frequencies /= frequencies.sum()
    done = tried = 0
    while (done < steps or not b.layers) and tried < 20 * steps:
        tried += 1
        step = STEPS[int(b.rng.choice(len(STEPS), p=frequencies))][0]
        try:
            step(b)
            done += 1
        except Rejected:
            continue
