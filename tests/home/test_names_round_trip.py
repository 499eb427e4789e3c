"""The round trip by name: export, init --weights, load_state_dict, and the module computes what the file computes."""

import contextlib
import io
import logging
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from lsuv_cli import initialize


def exported(module, example, path, dynamo):
    import torch

    quiet = logging.getLogger("torch.onnx")
    level, quiet.level = quiet.level, logging.ERROR
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = ({0: torch.export.Dim("N")},)
            torch.onnx.export(module, (example,), path, dynamo=True, input_names=["x"], dynamic_shapes=shapes)
        else:
            axes = {"x": {0: "N"}}
            torch.onnx.export(module, (example,), path, dynamo=False, input_names=["x"], dynamic_axes=axes)
    quiet.level = level
    return onnx.load(path)


def convolutions():
    """Conv, a depthwise one, ConvTranspose, and Linear on 3 and 2 axes, with and without bias."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.sequence = nn.Linear(6, 16)
            self.nobias = nn.Linear(16, 12, bias=False)
            self.head = nn.Linear(12, 5)
            self.last = nn.Linear(5, 5, bias=False)

        def forward(self, x):
            x = torch.relu(self.up(torch.relu(self.depthwise(torch.relu(self.conv(x))))))
            x = torch.relu(self.nobias(torch.relu(self.sequence(x.flatten(2).transpose(1, 2)))))
            return self.last(torch.relu(self.head(x.mean(1))))

    return Net(), torch.randn(16, 3, 8, 8)


def transformer():
    """nn.TransformerEncoder, whose layers are copies of one another until they are trained."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.encoder(self.embed(x)))

    return Net(), torch.randn(16, 6, 7)


# Which names of the state dict are not names of tensors in the exported file: the exporter changed these.
CHANGED = {
    ("convolutions", False): {"sequence.weight", "nobias.weight", "last.weight"},
    ("convolutions", True): {"sequence.weight", "nobias.weight"},
}


@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("build", [convolutions, transformer])
def test_the_round_trip(tmp_path, build, dynamo):
    import torch
    from safetensors.torch import load_file as load_torch

    torch.manual_seed(0)
    module, data = build()
    module.eval()
    before = exported(module, data, tmp_path / "m.onnx", dynamo)
    done = initialize(
        str(tmp_path / "m.onnx"),
        data.numpy(),
        output=tmp_path / "out.onnx",
        weights=tmp_path / "w.safetensors",
        tied="untie",
    )
    assert done.report.exit_code == 0
    state = load_torch(tmp_path / "w.safetensors")
    names = set(module.state_dict())
    assert set(state) <= names
    weights = {name for name in names if name.endswith("weight") and "norm" not in name}
    assert weights <= set(state)
    if (build.__name__, dynamo) in CHANGED:
        assert weights - {t.name for t in before.graph.initializer} == CHANGED[build.__name__, dynamo]

    assert not module.load_state_dict(state, strict=False).unexpected_keys
    session = ort.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": data.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(module(data).numpy(), expected, rtol=1e-4, atol=1e-4)
