"""What a page shows of a run beyond its numbers, measured only if asked for: histograms, channels, the graph's outline.

The channels' moments are those of the signal propagation plots of Brock, De and Smith ("Characterizing signal
propagation to close the performance gap in unnormalized ResNets", 2021): with m_c and v_c the mean and variance of
channel c over samples and positions, E_c[v_c] and E_c[m_c²]. Var(y) = E_c[v_c] + E_c[m_c²] - E[y]².
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINS = 24
MOST_ENTRIES = 1 << 16  # of an array that a histogram looks at, evenly spread over it
WIDEST = 5.0  # standard deviations from the mean; entries beyond are counted in the outermost bins


def digits(value: float) -> float:
    """A number with six digits: details are there to be looked at."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class Histogram:
    """How many of 1000 entries of an array fall into each of BINS equal intervals from `low` to `high`.

    One interval if all entries are the same. Fractions are rounded up, so that no entry goes unseen.
    """

    low: float
    high: float
    per_mille: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Histogram | None:
        """The histogram of an array's finite entries; None if there is none."""
        import numpy as np

        flat = np.ravel(array)
        flat = np.asarray(flat[:: math.ceil(flat.size / MOST_ENTRIES) or 1], np.float64)
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            mean, reach = float(flat.mean()), WIDEST * float(flat.std())
        low, high = float(flat.min()), float(flat.max())
        if math.isfinite(reach):
            low, high = max(low, mean - reach), min(high, mean + reach)
        if not low < high or not math.isfinite(high - low):  # a constant, or values at the ends of the type's range
            return cls(digits(low), digits(high), (1000,))
        counts, _ = np.histogram(np.clip(flat, low, high), BINS, (low, high))
        return cls(digits(low), digits(high), tuple(math.ceil(1000 * int(count) / flat.size) for count in counts))


@dataclass(frozen=True)
class LayerDetails:
    """One layer, looked at closely."""

    channel_variance: float | None = None  # E_c[v_c], over all data
    channel_mean_square: float | None = None  # E_c[m_c²], over all data
    weights: Histogram | None = None
    outputs: Histogram | None = None  # on the first few samples


@dataclass(frozen=True)
class OutlineNode:
    """A layer, or a node where branches join; what lies between is left out."""

    op: str
    layer: int | None  # its place among the report's layers; None for a joint
    after: tuple[int, ...]  # the nodes of the outline that it reads, by their places there; -1 is the model's input


@dataclass(frozen=True)
class Details:
    """The whole run, looked at closely."""

    files: dict[str, str] = field(default_factory=dict)  # file of the model as given -> its SHA-256
    versions: dict[str, str] = field(default_factory=dict)  # of Python and the libraries that did the work
    layers: tuple[LayerDetails, ...] = ()  # one for each of the report's layers
    outline: tuple[OutlineNode, ...] = ()
