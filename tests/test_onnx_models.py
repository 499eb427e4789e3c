"""Every model in the installed onnx wheel: a correct file, or one clear line; never a traceback or a wrong variance.

`real` holds only addresses of files to download, so it has nothing to run.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lsuv_cli
from helpers import near_one, rng, tensor, unchanged_but, variances
from lsuv_cli.errors import LsuvError

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
# A hundred million weights each: minutes, not seconds.
BIG = {"light_bvlc_alexnet", "light_vgg19", "light_zfnet512"}


def models(folder):
    found = sorted((DATA / folder).rglob("*.onnx"))
    return [pytest.param(p, id=p.parent.name if p.name == "model.onnx" else p.stem) for p in found]


def light_models():
    for param in models("light"):
        yield pytest.param(*param.values, id=param.id, marks=[pytest.mark.large] if param.id in BIG else [])


def fitting(proto, rows=2):
    """Random data that has the declared shapes and types; dimensions that are not fixed have `rows`."""
    found = {}
    stored = {t.name for t in proto.graph.initializer}
    for info in proto.graph.input:
        kind = info.type.tensor_type
        if info.name in stored or not kind.elem_type:
            continue
        shape = [d.dim_value if d.HasField("dim_value") else rows for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if kind.elem_type == TensorProto.STRING:
            found[info.name] = np.full(shape, "word", object)
        elif dtype.kind == "f":
            found[info.name] = rng().standard_normal(shape).astype(dtype)
        else:
            found[info.name] = rng().integers(0, 2, shape).astype(dtype)
    return found


def takes(path):
    proto = onnx.load(path)
    feeds = fitting(proto)
    try:
        result = lsuv_cli.initialize(proto, feeds, batch_size="all")
    except LsuvError as why:
        assert "\n" not in str(why)
        return str(why)
    assert {layer.status for layer in result.report.layers} <= {"ok", "skipped"}
    found = variances(result.model, feeds, reference=False)
    assert found
    assert near_one(found)
    return result


@pytest.mark.parametrize("path", [*models("pytorch-converted"), *models("pytorch-operator"), *models("simple")])
def test_a_small_model_is_initialized_or_refused_in_one_line(path):
    result = takes(path)
    if isinstance(result, str):
        if path.parent.name == "test_Linear":  # opset 6, with Gemm's old broadcasting
            assert "onnxruntime cannot run the model" in result
        else:
            assert "has no layer that can be initialized" in result
            assert not any(n.op_type in {"Conv", "ConvTranspose", "MatMul"} for n in onnx.load(path).graph.node)


@pytest.mark.parametrize("path", light_models())
def test_a_large_network_with_weights_in_constants_of_shape_is_initialized(path):
    result = takes(path)
    assert not isinstance(result, str)
    assert all(layer.status == "ok" for layer in result.report.layers)


def test_there_are_as_many_models_as_when_this_was_written():
    assert len(models("light")) >= 9
    assert sum(len(models(f)) for f in ("pytorch-converted", "pytorch-operator", "simple")) >= 140


@pytest.mark.parametrize("name", ["test_Conv2d_groups", "test_ConvTranspose2d", "test_Conv3d_dilated"])
def test_the_command_takes_them_too(name, tmp_path):
    (path,) = (DATA / "pytorch-converted" / name).glob("*.onnx")
    feeds = fitting(onnx.load(path))
    np.savez(tmp_path / "data.npz", **feeds)
    arguments = ["init", str(path), "--data", str(tmp_path / "data.npz"), "-o", str(tmp_path / "out.onnx"), "-q"]
    done = subprocess.run(
        [sys.executable, "-c", "from lsuv_cli.cli import main; main()", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    before, after = onnx.load(path), onnx.load(tmp_path / "out.onnx")
    assert near_one(variances(after, feeds, reference=False))
    assert unchanged_but(before, after, *(t.name for t in before.graph.initializer))
    weight = before.graph.node[0].input[1]
    assert np.isfinite(tensor(after, weight)).all()
