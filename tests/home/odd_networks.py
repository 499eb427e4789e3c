"""More networks to take to ONNX and back: those whose weights are kept, named or computed in less usual ways.

`NETWORKS` is that of networks.py with these added.
"""

from __future__ import annotations

import copy

import torch
from networks import NETWORKS, SMALL, WORDS, Built, _hugging, images, network, normal, text, tokens
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

__all__ = ["LIBRARY_OF", "NETWORKS"]

# In DeBERTa and Perceiver a product is with what a layer makes of constants, which is no weight.
HUGGING = {
    "SqueezeBERT": _hugging("SqueezeBertModel", "SqueezeBertConfig", text, **SMALL, **WORDS, embedding_size=32),
    "DeBERTa": _hugging("DebertaV2Model", "DebertaV2Config", text, **SMALL, **WORDS, relative_attention=True,
                        pos_att_type=["p2c", "c2p"], max_relative_positions=16),
    "Perceiver": _hugging("PerceiverModel", "PerceiverConfig", lambda: {"inputs": normal(10, 16)}, num_latents=6,
                          d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1,
                          num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=16, v_channels=16),
}  # fmt: skip
for _name, _build in HUGGING.items():
    network(_name)(_build)
LIBRARY_OF = dict.fromkeys(HUGGING, "transformers")  # network -> the library that it needs


@network("equalized learning rate")
def _equalized() -> Built:
    """Each weight is multiplied by a number at every call."""

    class Equalized(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight * (2 / self.in_features) ** 0.5, self.bias)

    return nn.Sequential(Equalized(8, 16), nn.ReLU(), Equalized(16, 16), nn.ReLU(), Equalized(16, 3)), (normal(8),)


@network("masked weights")
def _masked() -> Built:
    class Masked(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.register_buffer("mask", (torch.rand(self.weight.shape) > 0.5).float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight * self.mask, self.bias)

    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Masked(16, 16), nn.ReLU(), nn.Linear(16, 3)), (normal(8),)


@network("tensors outside the state dict")
def _outside() -> Built:
    """A buffer that is not persistent, and a plain attribute: no file of weights can hold them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.randn(8, 8))
            self.register_buffer("passing", torch.randn(8, 8), persistent=False)
            self.plain = torch.randn(8, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(functional.linear(x @ self.kept, self.passing))
            return self.head(torch.relu(x @ self.plain))

    return Net(), (normal(8),)


def _filled(kind: str) -> Built:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False))
    for part in net:
        if isinstance(part, nn.Linear):
            start = {"identity": torch.eye(8), "constant": torch.full((8, 8), 0.1)}.get(kind, part.weight.data)
            part.weight.data = start + start.T
    return net, (normal(5, 8) if kind == "symmetric" else normal(8),)


@network("identity weights")
def _identity() -> Built:
    return _filled("identity")


@network("constant weights")
def _constant() -> Built:
    return _filled("constant")


@network("symmetric weights")
def _symmetric() -> Built:
    return _filled("symmetric")


@network("recurrent cells")
def _cells() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.lstm, self.head = nn.GRUCell(6, 8), nn.LSTMCell(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, z, c = x[:, 0, :4].repeat(1, 2), x[:, 1, :4].repeat(1, 2), x[:, 2, :4].repeat(1, 2)
            for t in range(3):
                h = self.gru(x[:, t], h)
                z, c = self.lstm(h, (z, c))
            return self.head(z)

    return Net(), (normal(3, 6),)


@network("one module under three names")
def _aliases() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.parts = nn.ModuleDict({"x": shared, "y": shared, "z": nn.Linear(8, 8)})
            self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), shared)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in ("x", "y", "z"):
                x = torch.relu(self.parts[name](x))
            return self.block(x)

    return Net(), (normal(8),)


@network("a parametrized bias")
def _bias() -> Built:
    class Tanh(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.tanh(value)

        def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
            return torch.atanh(value)

    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parametrize.register_parametrization(net[0], "bias", Tanh())
    return net, (normal(8),)


@network("ParameterList and ParameterDict")
def _lists() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(4)])
            self.biases = nn.ParameterDict({f"b{k}": nn.Parameter(torch.zeros(8)) for k in range(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, weight in enumerate(self.weights):
                x = torch.relu(functional.linear(x, weight, self.biases[f"b{k}"]) if k % 2 else x @ weight)
            return x

    return Net(), (normal(8),)


@network("slices and joins of weights")
def _slices() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.a, self.b, self.out = nn.Linear(8, 24), nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, biases = self.qkv.weight.split(8), self.qkv.bias.split(8)
            q, k, v = (functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
            both = torch.cat([self.a.weight, self.b.weight]), torch.cat([self.a.bias, self.b.bias])
            return self.out(torch.relu(functional.linear(torch.tanh(q * k + v), *both)))

    return Net(), (normal(8),)


@network("blocks of copies, called out of order")
def _copies() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU())
            self.blocks = nn.ModuleList([nn.ModuleList([copy.deepcopy(block)]) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in (2, 0, 1):
                x = self.blocks[k][0](x)
            return x

    return Net(), (normal(8),)


@network("low-rank adapters")
def _adapters() -> Built:
    class Adapted(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base = nn.Linear(inputs, outputs)
            self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + (x @ self.down.T) @ self.up.T

    return nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 4)), (normal(8),)


@network("experts and einsum")
def _experts() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.back = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))
            self.gate, self.heads = nn.Linear(8, 3), nn.Parameter(torch.randn(8, 2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.bmm(torch.relu(torch.bmm(x.expand(3, -1, -1), self.into)), self.back)
            y = (y * self.gate(x).softmax(-1).T[..., None]).sum(0)
            return torch.einsum("nd,dhk->nhk", y, self.heads)

    return Net(), (normal(8),)


@network("attention called twice, extra keys")
def _twice() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = nn.MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x + self.attn(x, x, x)[0]
            return self.head(x)

    return Net(), (normal(5, 16),)


@network("channels last, circular padding")
def _channels_last() -> Built:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.SiLU(), nn.Conv2d(8, 8, 3, groups=2), nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 3, groups=4), nn.Flatten(), nn.Linear(4 * 64, 4),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last), (images(8)[0].to(memory_format=torch.channels_last),)


@network("norms without affine or statistics")
def _plain_norms() -> Built:
    return nn.Sequential(
        nn.BatchNorm1d(8), nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU(),
        nn.Linear(16, 16, bias=False), nn.LayerNorm(16, elementwise_affine=False), nn.ReLU(), nn.Linear(16, 2),
    ), (normal(8),)  # fmt: skip


@network("autoencoder with a transposed weight")
def _autoencoder() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.bias = nn.Linear(12, 6), nn.Parameter(torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(torch.relu(self.encode(x)), self.encode.weight.t(), self.bias)

    return Net(), (normal(12),)


@network("heads in a dict")
def _heads() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.heads = nn.Embedding(50, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            for head in self.heads:
                nn.init.zeros_(head.bias)

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.embed(ids).mean(1)
            return {"last": self.heads[2](x), "first": self.heads[0](x), "twice": self.heads[1](self.heads[1](x))}

    return Net(), (tokens(),)
