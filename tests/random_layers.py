# mypy: disable-error-code="arg-type"
"""The layers of a random model (random_models.py): one function for each kind, and for each odd use of one."""

from __future__ import annotations

import numpy as np

from random_models import Builder, Rejected, Value

MICROSOFT = "com.microsoft"


def spatial(v: Value) -> bool:
    return v.rank in {3, 4, 5} and min(v.shape) > 0


def conv(b: Builder) -> None:
    x = b.value(spatial)
    dims, channels = x.rank - 2, x.shape[1]
    group = b.pick([1, 1, 1, channels, *(g for g in (2, 4) if channels % g == 0)])
    out = group * b.number(1, 6)
    kernel = [b.number(1, min(3, s)) for s in x.shape[2:]]
    attributes: dict[str, object] = {"group": group}
    if b.chance(0.5):
        attributes["kernel_shape"] = kernel
    if b.chance(0.3):
        attributes["strides"] = [b.number(1, 2)] * dims
    if b.chance(0.3):
        attributes["auto_pad"] = b.pick(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        attributes["pads"] = [b.number(0, 1) for _ in range(2 * dims)]
        if b.chance(0.2):
            attributes["dilations"] = [2] * dims
    fused = b.chance(0.06)
    if fused:
        attributes["activation"] = b.pick(["Relu", "Tanh", "Sigmoid"])
    own = b.store(b.normal(out, spread=0.3)) if b.chance(0.4) else None
    inputs = [x, b.weight(out, channels // group, *kernel), *([own] if own else [])]
    y = b.op("FusedConv" if fused else "Conv", *inputs, domain=MICROSOFT if fused else "", **attributes)
    finish(b, y, own is None and not fused, out, *[1] * dims)


def conv_transpose(b: Builder) -> None:
    x = b.value(spatial)
    dims, channels = x.rank - 2, x.shape[1]
    group = b.pick([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    out = b.number(1, 4)
    attributes: dict[str, object] = {"group": group}
    if b.chance(0.5):
        attributes |= {"strides": [2] * dims, "output_padding": [b.number(0, 1) for _ in range(dims)]}
    if b.chance(0.3):
        attributes["pads"] = [b.number(0, 1)] * (2 * dims)
    own = b.store(b.normal(group * out, spread=0.3)) if b.chance(0.4) else None
    kernel = [b.number(1, 3) for _ in range(dims)]
    y = b.op("ConvTranspose", x, b.weight(channels, out, *kernel), *([own] if own else []), **attributes)
    finish(b, y, own is None, group * out, *[1] * dims)


def gemm(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 1 and min(v.shape) > 0)
    if x.rank > 2:
        x = b.op("Flatten", x)
    out, fan_in = b.number(1, 10), x.shape[1]
    trans_a, trans_b = int(b.chance(0.15)), int(b.chance(0.5))
    if trans_a:
        x = b.op("Transpose", x, perm=[1, 0])
    attributes = {"transA": trans_a, "transB": trans_b}
    if b.chance(0.3):
        attributes |= {"alpha": b.pick([0.5, 2.0, -1.0, 1e-3]), "beta": b.pick([0.5, 2.0, 0.0])}
    weight = b.weight(*((out, fan_in) if trans_b else (fan_in, out)))
    third: list[Value] = []
    if b.opset < 11 or b.chance(0.6):
        shape = b.pick([(out,), (1, out), (1,), (), (1, 1)])
        third = [b.store(b.normal(*shape, spread=0.3))]
        if b.chance(0.1):
            third = [b.value(lambda v: v.rank == 2 and v.shape[1] in {1, out} and not v.constant)]
    fused = b.chance(0.05)
    if fused:
        attributes["activation"] = b.pick(["Relu", "Tanh"])
    y = b.op("FusedGemm" if fused else "Gemm", x, weight, *third, domain=MICROSOFT if fused else "", **attributes)
    finish(b, y, not third and not fused, out)


def matmul(b: Builder) -> None:
    x = b.value(lambda v: v.rank > 0 and min(v.shape) > 0)
    out = b.number(1, 10)
    form = b.pick(["right"] * 6 + ["left", "left", "batched", "vector", "fused"])
    if form == "left" and x.rank > 2:
        y = b.op("MatMul", b.weight(out, x.shape[-2]), x)
        finish(b, y, True, out, 1)
    elif form == "batched" and x.rank > 2:
        y = b.op("MatMul", x, b.weight(x.shape[-3], x.shape[-1], out))
        finish(b, y, True, out)
    elif form == "vector":
        finish(b, b.op("MatMul", x, b.weight(x.shape[-1])), False)
    elif form == "fused":
        attributes = {"alpha": b.pick([1.0, 0.25]), "transB": int(b.chance(0.5))}
        shape = (out, x.shape[-1]) if attributes["transB"] else (x.shape[-1], out)
        finish(b, b.op("FusedMatMul", x, b.weight(*shape), domain=MICROSOFT, **attributes), True, out)
    else:
        finish(b, b.op("MatMul", x, b.weight(x.shape[-1], out)), True, out)


def einsum(b: Builder) -> None:
    x = b.value(lambda v: v.rank in {2, 3} and min(v.shape) > 0)
    n, d = x.shape[-2:]
    out, heads = b.number(1, 6), b.number(1, 3)
    if x.rank == 2:
        equation, shape = b.pick([("nd,dk->nk", (d, out)), ("nd,kd->nk", (out, d)), ("nd,dhk->nhk", (d, heads, out))])
        y = b.op("Einsum", x, b.weight(*shape), equation=equation)
    else:
        equation, shape = b.pick([
            ("btd,dk->btk", (d, out)), ("btd,hdk->bhtk", (heads, d, out)), ("btd,tk->bkd", (n, out)),
        ])  # fmt: skip
        y = b.op("Einsum", x, b.weight(*shape), equation=equation)
    finish(b, y, False)


def embedding(b: Builder) -> None:
    """A table whose rows are looked up, and which may be a layer's weight as well."""
    if "ids" not in b.draft.values:
        raise Rejected
    table = b.store(b.normal(9, b.pick([4, 6])))
    b.op("Gather", table, b.draft.values["ids"])
    if b.chance(0.4):
        b.weights.append(table)


def recurrent(b: Builder) -> None:
    if "rows that may be none" in b.draft.features:
        raise Rejected  # onnxruntime ends the process at a GRU whose input is empty
    x = b.value(lambda v: v.rank == 3 and min(v.shape) > 0)
    hidden, gates = b.number(2, 4), {"LSTM": 4, "GRU": 3, "RNN": 1}
    kind = b.pick(list(gates))
    weights = [b.store(b.normal(1, gates[kind] * hidden, d, spread=0.4)) for d in (x.shape[2], hidden)]
    b.op(kind, x, *weights, hidden_size=hidden)
    b.draft.features.add("recurrent")


def finish(b: Builder, y: Value, may_add: bool, *bias: int) -> None:
    """What stands behind a layer: perhaps a bias, and mostly an activation."""
    b.layers.append(y.name)
    if may_add and b.chance(0.35):
        y = b.add_bias(y, *bias)
        b.layers[-1] = y.name
    if b.chance(0.6):
        b.op(b.pick(["Relu", "Relu", "Tanh", "LeakyRelu", "Sigmoid"]), y)


def chain(b: Builder) -> None:
    """Many layers in a row with a constant factor behind each: scales that add up beyond float32's range."""
    x = b.value(lambda v: v.rank == 2 and min(v.shape) > 1)
    factor, width = b.pick([1.0, 255.0, 1e4, 1e-10]), b.pick([4, 8])
    b.draft.features.add("chain of factors")
    for _ in range(b.number(4, 20)):
        weight = b.store(b.normal(x.shape[1], width, spread=1 / (factor * width**0.5)))
        x = b.op("MatMul", x, weight)
        b.layers.append(x.name)
        x = b.op("Mul", x, b.scalar(factor)) if factor != 1.0 else x
        x = b.op("Relu", x) if b.chance(0.3) else x


def unrolled(b: Builder) -> None:
    """A recurrence written out: one weight for all steps, and a state that begins with zeros."""
    x = b.value(lambda v: v.rank == 3 and min(v.shape) > 1 and v.shape[1] <= 6)
    inner, outer = b.weight(x.shape[2], 4), b.store(b.normal(4, 4, spread=0.5))
    start = b.op("MatMul", b.op("Gather", x, b.store(np.array(0)), axis=1), b.store(b.normal(x.shape[2], 4)))
    state = b.op("Mul", start, b.scalar(0.0))
    b.draft.features |= {"tied", "unrolled"}
    for step in range(x.shape[1]):
        new = b.op("MatMul", b.op("Gather", x, b.store(np.array(step)), axis=1), inner)
        state = b.op("Tanh", b.op("Add", new, b.op("MatMul", state, outer)))
    b.layers.append(state.name)


def cancelled(b: Builder) -> None:
    """What is zero on paper and rounding errors in practice, in front of a layer."""
    x = b.value(lambda v: v.rank > 1 and min(v.shape) > 1)
    b.draft.features.add("cancelled")
    if b.chance(0.5):
        mean = b.with_axes("ReduceMean", x, [x.rank - 1], 18, keepdims=1)
        rest = b.with_axes("ReduceMean", b.op("Sub", x, mean), [x.rank - 1], 18, keepdims=1)
    else:
        rest = b.op("Sub", b.op("Div", b.op("Mul", x, b.scalar(3.0)), b.scalar(3.0)), x)
    y = b.op("MatMul", rest, b.weight(rest.shape[-1], b.number(1, 6)))
    b.layers.append(y.name)
