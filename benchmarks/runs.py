"""The training runs: what decides how one goes, how far one has come, and which there are."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

NETWORKS = ("fitnet4", "fitresnet4")
INITS = ("lsuv", "orthonormal", "xavier", "msra")
ACTIVATIONS = ("maxout", "relu", "vlrelu", "tanh")

# A run has converged when its training loss, averaged over the last WINDOW iterations, is below THRESHOLD. Guessing
# has ln 10 = 2.30.
THRESHOLD = 2.2
WINDOW = 50
# The hinge loss is a sum over ten classes. At 0.01 it diverged within 40 iterations; 0.002 is the rate in the authors'
# files for MNIST.
HINGE_RATE = 0.002


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


@dataclass(frozen=True)
class Run:
    """Everything that decides how a run goes. Two runs with the same name are the same run."""

    name: str
    network: str
    activation: str
    init: str
    seed: int = 0
    batch_norm: str | None = None
    dataset: str = "cifar10"
    loss: str = "softmax"
    iterations: int = 200
    batch_size: int = 64
    optimizer: str = "sgd"  # with momentum 0.9, or "rmsprop"
    rms_decay: float = 0.99  # of RMSProp's mean square, by iteration
    rate: float = 0.01
    drops: tuple[float, ...] = ()  # fractions of the run after which the rate falls tenfold
    decay: float = 5e-4
    decay_biases: bool = False
    dropout: float = 0.0
    dropout_before: tuple[str, ...] = ("conv11", "conv21", "conv31", "ip1", "ip2")
    augment: bool = True
    images: str = "normalized"  # by channel, or "divided" by 250
    log_every: int = 10
    test_every: int = 100
    test_images: int = 1000
    calibration_images: int = 256
    bfloat16: bool = False  # convolutions and matrix products of a training step; weights and loss are float32

    def rate_at(self, iteration: int) -> float:
        return self.rate * 0.1 ** sum(iteration >= fraction * self.iterations for fraction in self.drops)

    def settings(self) -> dict[str, Any]:
        return _as_json(dataclasses.asdict(self))

    def changed(self, saved: dict[str, Any]) -> set[str]:
        """The settings in which a saved run differs. One that the saved run does not name had its default then."""
        whole = _as_json({k.name: k.default for k in dataclasses.fields(self)}) | saved
        return {k for k, v in self.settings().items() if whole[k] != v}

    def same_start(self, saved: dict[str, Any]) -> bool:
        """Whether a saved run is this one, only shorter or longer."""
        return self.changed(saved) <= (set() if self.drops else {"iterations"})


@dataclass
class State:
    """How far a run has come."""

    iteration: int = 0
    seconds: float = 0.0  # of training alone, not of tests
    cpu_seconds: float = 0.0
    losses: list[float | None] = field(default_factory=list)  # means over log_every iterations
    pending: list[float] = field(default_factory=list)
    tests: list[dict[str, float]] = field(default_factory=list)
    diverged_at: int | None = None

    def recent(self, run: Run) -> float | None:
        last = self.losses[-(WINDOW // run.log_every) or -1 :]
        kept = [v for v in last if v is not None]
        return statistics.fmean(kept) if last and len(kept) == len(last) else None

    def converged_at(self, run: Run) -> int | None:
        """The first iteration at which the running mean is below the threshold."""
        size = max(1, WINDOW // run.log_every)
        for end in range(size, len(self.losses) + 1):
            window = self.losses[end - size : end]
            if None not in window and statistics.fmean(v for v in window if v is not None) < THRESHOLD:
                return end * run.log_every
        return None

    def outcome(self, run: Run) -> str:
        if self.diverged_at is not None:
            return "diverged"
        recent = self.recent(run)
        return "converged" if recent is not None and recent < THRESHOLD else "n/c"


def cifar_run(network: str, activation: str, init: str, **other: Any) -> Run:
    return Run(f"{network}-{activation}-{init}{_mark(other)}", network, activation, init, **other)


def _mark(other: dict[str, Any]) -> str:
    """Part of a name: most tables show the runs with seed 0 and the paper's rate, which have none."""
    rate = f"-rate-{other['rate']}" if other.get("rate", Run.rate) != Run.rate else ""
    return (f"-s{other['seed']}" if other.get("seed") else "") + rate


def grid_runs(**other: Any) -> list[Run]:
    """Each network with LSUV first and with maxout, the slowest, last."""
    activations = sorted(ACTIVATIONS, key=lambda a: a == "maxout")
    return [cifar_run(n, a, i, **other) for n in NETWORKS for a in activations for i in INITS]


def case_runs(**other: Any) -> list[Run]:
    return [cifar_run("fitnet4", "relu", init, **other) for init in ("lsuv", "given")]


def bn_runs(activation: str, **other: Any) -> list[Run]:
    plain = {"network": "fitnet4", "activation": activation, "test_every": 50, **other}
    return [
        Run(name=f"bn-{activation}-lsuv{_mark(other)}", init="lsuv", **plain),
        Run(name=f"bn-{activation}-before-xavier{_mark(other)}", init="xavier", batch_norm="before", **plain),
        Run(name=f"bn-{activation}-after-xavier{_mark(other)}", init="xavier", batch_norm="after", **plain),
    ]


# CIFAR-10 for several epochs: tenfold drops after 100, 150 and 200 of the paper's 230 epochs, scaled to ours.
EPOCH = 312  # iterations of 64 images in an epoch of 20,000
_LONG: dict[str, Any] = {
    "drops": tuple(round(epoch / 230, 3) for epoch in (100, 150, 200)),
    "log_every": 52,
    "test_every": EPOCH,
    "test_images": 5000,
}
# Batch normalization stands in front of the non-linearity, as in the paper's Figure 3; its weights are Xavier's.
LONG_STARTS: dict[str, dict[str, Any]] = {
    "lsuv": {"init": "lsuv"},
    "norm": {"init": "xavier", "batch_norm": "before"},
    "xavier": {"init": "xavier"},
    "msra": {"init": "msra"},
}


def long_runs(**other: Any) -> list[Run]:
    """The cheapest networks first. With MSRA, FitNet-4 with ReLU does not leave guessing (see the grid)."""
    return [
        Run(f"long-{network}-{activation}-{start}{_mark(other)}", network, activation, **how, **(_LONG | other))
        for network in ("fitnet1", "fitnet4")
        for activation in ("relu", "maxout")
        for start, how in LONG_STARTS.items()
        if (network, activation, start) != ("fitnet4", "relu", "msra")
    ]


# What the SGD runs on MNIST share with the authors' own recipe: tenfold drops at 0.3, 0.6 and 0.9 of the run.
_MNIST: dict[str, Any] = {
    "dataset": "mnist",
    "drops": (0.3, 0.6, 0.9),
    "decay_biases": True,
    "dropout": 0.3,
    "dropout_before": ("ip1",),
    "augment": False,
    "log_every": 100,
    "test_every": 937,  # once an epoch
    "test_images": 10000,
}


def mnist_runs(seeds: int, **other: Any) -> list[Run]:
    recipe = _MNIST | other
    return [
        Run(f"mnist-{init}-{loss}-s{seed}", "fitnet_mnist", "maxout", init, seed, loss=loss, rate=rate, **recipe)
        for seed in range(seeds)
        for loss, rate in (("softmax", 0.01), ("hinge", HINGE_RATE))
        for init in ("lsuv", "orthonormal")
    ]


# The authors' solver for MNIST, the same in their four files. Caffe's RMSProp divides the gradient by
# sqrt(mean square) + 1e-8, as PyTorch's does.
AUTHORS: dict[str, Any] = {"optimizer": "rmsprop", "rate": 0.002, "rms_decay": 0.99, "images": "divided"}


def authors_runs(seeds: int, **other: Any) -> list[Run]:
    """All four cells with one seed, then with the next. A setting that is not the authors' is part of the name."""
    recipe = _MNIST | AUTHORS | other
    marks = "".join(f"-{k}-{recipe[k]}" for k, v in AUTHORS.items() if recipe[k] != v)
    return [
        Run(f"authors-{init}-{loss}-s{seed}{marks}", "fitnet_mnist", "maxout", init, seed, loss=loss, **recipe)
        for seed in range(seeds)
        for loss in ("softmax", "hinge")
        for init in ("lsuv", "orthonormal")
    ]
