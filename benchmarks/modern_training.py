"""Many runs of one architecture at once: their weights are stacked, and each batch goes through all of them together.

On small networks most of a step is overhead, which the runs of a stack share: ten runs of the 100-layer CNN take the
time of four and a half. Each run has its own weights, batches, optimizer and rate; no number of one reaches another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call, stack_module_state, vmap

MOMENTUM = 0.9
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # AdamW's, PyTorch's defaults


@dataclass(frozen=True)
class Run:
    """What makes one run of a stack different from the next. The seed decides its batches."""

    optimizer: str  # "sgd", with momentum, or "adamw"
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.optimizer} {self.rate:g} s{self.seed}"


class Steps:
    """Steps of SGD with momentum and of AdamW for stacked parameters: the first rows are SGD's, the others AdamW's."""

    def __init__(self, parameters: Sequence[Any], runs: Sequence[Run]) -> None:
        self.parameters, self.step = parameters, 0
        self.first = sum(run.optimizer == "sgd" for run in runs)
        if any(run.optimizer == "sgd" for run in runs[self.first :]):
            raise ValueError("runs with SGD come before those with AdamW")
        kind = parameters[0].dtype
        kept = [[1 - run.rate * DECAY if run.optimizer == "adamw" else 1.0] for run in runs]
        self.rates, self.kept = torch.tensor([[run.rate] for run in runs], dtype=kind), torch.tensor(kept, dtype=kind)
        self.mean = torch.zeros(len(runs), sum(p[0].numel() for p in parameters), dtype=kind)
        self.square = torch.zeros_like(self.mean[self.first :])

    @torch.no_grad()
    def take(self) -> None:
        self.step += 1
        gradient = torch.cat([p.grad.flatten(1) for p in self.parameters], 1)
        sgd, adamw = slice(self.first), slice(self.first, None)
        self.mean[sgd].mul_(MOMENTUM).add_(gradient[sgd])
        self.mean[adamw].lerp_(gradient[adamw], 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient[adamw], gradient[adamw], value=1 - BETAS[1])
        change = self.rates * self.mean
        divisor = self.square.sqrt().div_(math.sqrt(1 - BETAS[1] ** self.step)).add_(EPSILON)
        change[adamw].div_(divisor).div_(1 - BETAS[0] ** self.step)
        sizes = [p[0].numel() for p in self.parameters]
        for p, part in zip(self.parameters, change.split(sizes, 1), strict=True):
            p.mul_(self.kept.view(-1, *[1] * (p.ndim - 1))).sub_(part.view_as(p))
            p.grad = None


def train(nets: Sequence[Any], task: Any, runs: Sequence[Run], steps: int) -> list[dict[str, Any]]:
    """Of each run: the loss on held-out data at the end, and the training loss ten times on the way.

    A run whose loss was not finite at some step has None from there on.
    """
    parameters, buffers = stack_module_state(list(nets))
    base = nets[0].train()

    def loss_of(parameters: Any, buffers: Any, x: Any, y: Any) -> Any:
        return task.loss(functional_call(base, (parameters, buffers), (x,)), y)

    steering = Steps(list(parameters.values()), runs)
    batches = {run.seed: task.batches(run.seed) for run in runs}
    finite = torch.ones(len(runs), dtype=torch.bool)
    logged: list[list[float | None]] = [[] for _ in runs]
    for step in range(steps):
        drawn = {seed: next(found) for seed, found in batches.items()}
        x, y = (torch.stack([drawn[run.seed][k] for run in runs]) for k in (0, 1))
        losses = vmap(loss_of)(parameters, buffers, x, y)
        finite &= losses.detach().isfinite()
        if not finite.any():
            break
        if step % max(1, steps // 10) == 0:
            for log, loss in zip(logged, rounded(losses.detach(), finite), strict=True):
                log.append(loss)
        losses.sum().backward()
        steering.take()
    base.eval()
    with torch.no_grad():
        found = vmap(loss_of, in_dims=(0, 0, None, None))(parameters, buffers, *task.held_out)
    finite &= found.isfinite()
    return [{"loss": loss, "losses": log} for loss, log in zip(rounded(found, finite), logged, strict=True)]


def rounded(losses: Any, finite: Any) -> list[float | None]:
    return [round(loss, 4) if ok else None for loss, ok in zip(losses.tolist(), finite.tolist(), strict=True)]
