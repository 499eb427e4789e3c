"""The figures of docs/pytorch.md on train mode and on folding: `python tests/home/figures.py`.

Variances are taken by forward hooks, in eval and in train mode; outputs are compared with the written ONNX file's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import networks
import numpy as np
import onnx
import torch
from round_trip import difference, export, feeds, variances
from torch import nn

import lsuv_cli
from lsuv_cli.torch import lsuv_

NORMS = nn.modules.batchnorm._BatchNorm


def modes(name: str, net: nn.Module, data: torch.Tensor) -> None:
    """Variances after the one call, in both modes."""
    lsuv_(net, data)
    for mode in (False, True):
        torch.manual_seed(0)  # of Dropout
        found = [value for values in variances(net.train(mode), (data,)).values() for value in values]
        listed = ", ".join(f"{value:.4g}" for value in found)
        print(f"{name}, {'train' if mode else 'eval'} mode: {min(found):.4f} to {max(found):.4f} ({listed})")


def deep(dropout: float) -> nn.Module:
    """Ten linear layers with ReLU and Dropout between them."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(10):
        parts += [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*parts[:-2]).eval()


def folded(trained: bool) -> None:
    """What a U-Net computes with the weights of a folded file under their old names."""
    net, batch = networks.NETWORKS["U-Net"]()
    for part in net.modules():
        if isinstance(part, NORMS) and not trained:
            part.reset_parameters()
    with tempfile.TemporaryDirectory() as directory:
        path = export(net, batch, Path(directory) / "model.onnx", "legacy", folded=True)
        written = path.with_name("out.onnx")
        given = feeds(path, net, batch)
        report = lsuv_cli.initialize(path, given, output=written, batch_size="all").report
        held = onnx.load(written).graph
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in held.initializer}
        inputs = {node.name: node.input for node in held.node}
        state = net.state_dict()
        for layer in report.layers:
            state[f"{layer.module}.weight"] = torch.from_numpy(np.array(arrays[inputs[layer.name][1]]))
            if f"{layer.module}.bias" in state:
                state[f"{layer.module}.bias"] = torch.from_numpy(np.array(arrays[inputs[layer.name][2]]))
        net.load_state_dict(state)
        gap = difference(net, batch, written, given)
    most = max(value for values in variances(net, batch).values() for value in values)
    kind = "trained" if trained else "fresh"
    print(f"U-Net, {kind} statistics, folded: output off by {gap:.2g} of its largest value, variances up to {most:.4g}")


def main() -> None:
    import torchvision

    torch.manual_seed(0)
    modes("resnet18", torchvision.models.resnet18(weights=None).eval(), torch.randn(64, 3, 32, 32))
    data = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
    modes("ten layers with Dropout(0.5)", deep(0.5), data)
    modes("ten layers without", deep(0.0), data)
    folded(trained=True)
    folded(trained=False)


if __name__ == "__main__":
    main()
