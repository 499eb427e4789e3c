"""The networks of modern.py, small enough for a few seconds of one core each, and the task that each one learns.

Each is built with and without normalization where its architecture has one. Widths are small and depths are not: depth
is what an initialization has to get right.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pipeline
import torch
from torch import nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[], Any]] = {"ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}
WIDTH, CHANNELS = 32, 16  # of a token; of an image
PATCH, PATCHES, CONTEXT = 7, 16, 16  # a patch has 7 x 7 pixels; a digit, 28 x 28, has 4 x 4 patches
PIXELS = 28 * 28
SIREN_WIDTH, OMEGA = 64, 30


class Plain(nn.Module):
    """Convolutions of 3 x 3 one behind another on patches of 7 x 7 pixels, then the mean over the image."""

    def __init__(self, depth: int, activation: str, norm: bool) -> None:
        super().__init__()
        layers: list[Any] = []
        for k in range(depth - 1):
            layers.append(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) if k else nn.Conv2d(1, CHANNELS, PATCH, PATCH))
            layers += [nn.BatchNorm2d(CHANNELS)] if norm else []
            layers.append(ACTIVATIONS[activation]())
        self.body, self.head = nn.Sequential(*layers), nn.Linear(CHANNELS, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).mean((2, 3)))


class Residual(nn.Module):
    """x + f(x), with a normalization in front of f or without one."""

    def __init__(self, branch: Any, norm: Any) -> None:
        super().__init__()
        self.norm, self.branch = norm, branch

    def forward(self, x: Any) -> Any:
        return x + self.branch(self.norm(x))


class ResNet(nn.Module):
    def __init__(self, blocks: int, norm: bool) -> None:
        super().__init__()

        def conv() -> Any:
            return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

        self.stem = nn.Conv2d(1, CHANNELS, PATCH, PATCH)
        self.body = nn.Sequential(
            *(
                Residual(
                    nn.Sequential(nn.ReLU(), conv(), nn.ReLU(), conv()),
                    nn.BatchNorm2d(CHANNELS) if norm else nn.Identity(),
                )
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(self.stem(x)).relu().mean((2, 3)))


class Transposed(nn.Module):
    """A layer over the tokens in place of the features."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) / (WIDTH // self.heads) ** 0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -1e4).triu(1)
        return self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


def mlp(width: int, inner: int) -> Any:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def token_mixing(kind: str) -> Any:
    """What moves information from token to token."""
    if kind == "resmlp":
        return Transposed(nn.Linear(PATCHES, PATCHES))
    if kind == "mixer":
        return Transposed(mlp(PATCHES, 2 * PATCHES))
    return Attention(causal=kind == "gpt")


class Tokens(nn.Module):
    """ResMLP, Mixer, ViT or GPT: blocks of token mixing and of an MLP, each on a residual stream."""

    def __init__(self, kind: str, blocks: int, norm: bool, words: int = 0) -> None:
        super().__init__()
        self.first = nn.Embedding(words, WIDTH) if words else nn.Linear(PATCH * PATCH, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT if words else PATCHES, WIDTH))

        def residual(branch: Any) -> Any:
            return Residual(branch, nn.LayerNorm(WIDTH) if norm else nn.Identity())

        body = [residual(part) for _ in range(blocks) for part in (token_mixing(kind), mlp(WIDTH, 2 * WIDTH))]
        self.body = nn.Sequential(*body, nn.LayerNorm(WIDTH) if norm else nn.Identity())
        self.head, self.is_text = nn.Linear(WIDTH, words or 10), bool(words)

    def forward(self, x: Any) -> Any:
        if not self.is_text:
            x = x.unflatten(2, (4, PATCH)).unflatten(4, (4, PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        y = self.body(self.first(x) + self.place)
        return self.head(y if self.is_text else y.mean(1))


def autoencoder() -> Any:
    widths = (PIXELS, 128, 96, 64, 32, 16, 32, 64, 96, 128, PIXELS)
    layers: list[Any] = []
    for k, (into, out) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(into, out), *([nn.ReLU()] if k < len(widths) - 2 else [])]
    return nn.Sequential(*layers)


class Sine(nn.Module):
    """sin(30·x), the activation of SIREN, whose own initialization divides the weights by 30 again."""

    def forward(self, x: Any) -> Any:
        return torch.sin(OMEGA * x)


def siren() -> Any:
    layers: list[Any] = [nn.Linear(2, SIREN_WIDTH), Sine()]
    for _ in range(4):
        layers += [nn.Linear(SIREN_WIDTH, SIREN_WIDTH), Sine()]
    return nn.Sequential(*layers, nn.Linear(SIREN_WIDTH, 3))


def siren_own_(net: Any) -> None:
    """The initialization of SIREN's authors: uniform, 1 / inputs in the first layer, then √(6 / inputs) / 30."""
    for k, layer in enumerate(layer for layer in net if isinstance(layer, nn.Linear)):
        bound = (6 / layer.in_features) ** 0.5 / OMEGA if k else 1 / layer.in_features
        nn.init.uniform_(layer.weight, -bound, bound)


@dataclass(frozen=True)
class Task:
    """Batches, a loss, and what the best constant answer would have."""

    batches: Callable[[int], Iterator[tuple[Any, Any]]]  # by seed, without end
    held_out: tuple[Any, Any]
    loss: Callable[[Any, Any], Any]
    constant: float


@dataclass(frozen=True)
class Setting:
    """An architecture, built with or without normalization, and its task."""

    build: Callable[[bool], Any]
    task: str
    normalized: bool = True  # the architecture has a form with normalization
    residual: bool = False
    own: Callable[[Any], None] | None = None  # the initialization that its authors gave it


SETTINGS: Mapping[str, Setting] = {
    **{
        f"plain CNN, {depth} layers, {name}": Setting(functools.partial(Plain, depth, name), "images")
        for depth in (10, 30, 100)
        for name in ACTIVATIONS
    },
    "ResNet, 8 blocks": Setting(lambda norm: ResNet(8, norm), "images", residual=True),
    "ResMLP, 8 blocks": Setting(lambda norm: Tokens("resmlp", 8, norm), "images", residual=True),
    "Mixer, 8 blocks": Setting(lambda norm: Tokens("mixer", 8, norm), "images", residual=True),
    "ViT, 6 blocks": Setting(lambda norm: Tokens("vit", 6, norm), "images", residual=True),
    "GPT, 4 blocks": Setting(lambda norm: Tokens("gpt", 4, norm, words=128), "text", residual=True),
    "autoencoder, 10 layers": Setting(lambda _: autoencoder(), "rebuilt", normalized=False),
    "SIREN, 6 layers": Setting(lambda _: siren(), "picture", normalized=False, own=siren_own_),
}


def cross_entropy(found: Any, wanted: Any) -> Any:
    return functional.cross_entropy(found.flatten(0, -2), wanted.flatten())


def squared(found: Any, wanted: Any) -> Any:
    return functional.mse_loss(found, wanted)


def tasks(digits: pipeline.Images, photographs: pipeline.Images, batch: int) -> dict[str, Task]:
    """All tasks: MNIST's digits, named or rebuilt; Python's own documentation, letter by letter; a CIFAR-10 picture."""
    x = torch.from_numpy(digits.normalized(slice(0, 10_000)))
    y = torch.from_numpy(digits.labels[:10_000])
    flat = x.flatten(1)
    letters = torch.from_numpy(np.frombuffer(_documentation().encode("ascii", "replace"), np.uint8).astype(np.int64))
    held, text_held = 512, len(letters) - 512 * (CONTEXT + 1)

    def drawn(x: Any, y: Any) -> Callable[[int], Iterator[tuple[Any, Any]]]:
        def batches(seed: int) -> Iterator[tuple[Any, Any]]:
            rng = torch.Generator().manual_seed(seed)
            while True:
                which = torch.randint(held, len(x), (batch,), generator=rng)
                yield x[which], y[which]

        return batches

    def texts(seed: int) -> Iterator[tuple[Any, Any]]:
        rng = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(0, text_held - CONTEXT - 1, (batch,), generator=rng)
            rows = letters[starts[:, None] + torch.arange(CONTEXT + 1)]
            yield rows[:, :-1], rows[:, 1:]

    last = letters[text_held:].reshape(512, CONTEXT + 1)
    counts = torch.bincount(last[:, 1:].flatten(), minlength=128).double()
    shares = counts[counts > 0] / counts.sum()
    line = torch.linspace(-1, 1, 16)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), 2).reshape(-1, 2)
    colours = torch.from_numpy(photographs.normalized(slice(0, 1)))[0, :, ::2, ::2].flatten(1).T.contiguous()
    picture = (places, colours)
    return {
        "images": Task(drawn(x, y), (x[:held], y[:held]), cross_entropy, float(np.log(10))),
        "rebuilt": Task(drawn(flat, flat), (flat[:held], flat[:held]), squared, _variance(flat[:held])),
        "text": Task(texts, (last[:, :-1], last[:, 1:]), cross_entropy, float(-(shares * shares.log()).sum())),
        "picture": Task(lambda _: itertools.repeat(picture), picture, squared, _variance(colours)),
    }


def _variance(wanted: Any) -> float:
    """The squared error of the mean over the samples: of the best answer that does not look at its input."""
    return float((wanted - wanted.mean(0)).square().mean())


def _documentation() -> str:
    """A few hundred thousand letters of English that every Python brings along."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))
