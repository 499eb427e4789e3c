"""Line charts as SVG: one value for each layer, in the order of execution, on a log axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lsuv_cli.page.markup import text

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 960, 230, 58, 12, 10
NAME_HEIGHT, NUMBER_HEIGHT = 22, 36  # below the axis, for names (and 4 for each letter) and for numbers of layers
LONGEST_NAME = 20
MOST_NAMES, MOST_MARKERS = 32, 120  # layers that are named on the axis; layers whose points are marked
MOST_TICKS = 7
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Series = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Axis:
    """A log axis from 10**low to 10**high."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """An axis with room for all positive finite values."""
        logs = [math.log10(v) for v in values if 0 < v < math.inf]
        low, high = min(logs, default=-1.0), max(logs, default=1.0)
        margin = max(0.06 * (high - low), 0.12)
        return cls(low - margin, high + margin)

    def y(self, value: float) -> float:
        """The height of a value; values off the axis are at its ends."""
        at = self.low if value <= 0 else self.high if value == math.inf else math.log10(value)
        ratio = (min(max(at, self.low), self.high) - self.low) / (self.high - self.low)
        return round(TOP + (HEIGHT - TOP) * (1 - ratio), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Values with their labels: powers of ten, or 1, 2 and 5 times them where the axis is short."""
        span = self.high - self.low
        if span < 2:
            for power in range(math.floor(self.low), math.ceil(self.high) + 1):
                for digit in (1, 2, 5):
                    if self.low <= power + math.log10(digit) <= self.high:
                        yield digit * 10.0**power, f"{digit * 10.0**power:g}"
            return
        step = math.ceil(span / MOST_TICKS)
        for power in range(math.ceil(self.low / step) * step, math.floor(self.high) + 1, step):
            shown = f"{10.0**power:g}" if -3 <= power <= 3 else f"10{str(power).translate(SUPERSCRIPTS)}"
            yield 10.0**power, shown


def place(k: int, count: int) -> float:
    """The x of a layer."""
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (k + 0.5) / max(count, 1), 1)


def chart(key: str, title: str, names: Sequence[str], series: Series, band: tuple[float, float] | None = None) -> str:
    """A chart with a legend; `band` is the range of values that is good."""
    known = [v for values in series.values() for v in values if v is not None]
    axis = Axis.around([*known, *(band or ())])
    parts = []
    if band is not None:
        top, bottom = axis.y(band[1]), axis.y(band[0])
        parts.append(
            f'<rect class="band" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{max(round(bottom - top, 1), 1.5)}"/>'
        )
    parts.append(_grid((axis.y(value), label) for value, label in axis.ticks()))
    parts += [_line(k, values, axis, len(names)) for k, values in enumerate(series.values())]
    return _figure(key, title, names, series, "".join(parts), band)


def bars(key: str, title: str, names: Sequence[str], series: Series) -> str:
    """A chart of fractions on a linear axis: bars, side by side where there are several series."""
    top = max((v for values in series.values() for v in values if v is not None), default=0.0)
    step = next((s for s in (0.01, 0.02, 0.05, 0.1) if top / s <= MOST_TICKS - 1), 0.2)
    high = max(math.ceil(top / step) * step, step)
    cell = (WIDTH - LEFT - RIGHT) / max(len(names), 1)
    wide = min(cell * 0.7, 40.0) / len(series)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP) * (1 - value / high), 1)

    parts = [_grid((y(k * step), f"{k * step:.0%}") for k in range(round(high / step) + 1))]
    for k, values in enumerate(series.values()):
        shift = (k - (len(series) - 1) / 2) * wide
        drawn = "".join(
            f"M{place(at, len(names)) + shift:.1f} {HEIGHT}V{y(value)}" for at, value in enumerate(values) if value
        )
        parts.append(f'<g class="s{k}"><path class="bars" stroke-width="{wide:.1f}" d="{drawn}"/></g>')
    return _figure(key, title, names, series, "".join(parts), None)


def _figure(
    key: str, title: str, names: Sequence[str], series: Series, drawn: str, band: tuple[float, float] | None
) -> str:
    named = len(names) <= MOST_NAMES
    shown = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]
    longest = max(map(len, shown), default=0)
    height = HEIGHT + (NAME_HEIGHT + 4 * longest if named else NUMBER_HEIGHT)
    svg = (
        f'<svg id="{key}" class="chart" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" aria-label="{text(_told(title, names, series), 2000)}">'
        f'{drawn}{_below(shown, named)}<line class="cursor" y1="{TOP}" y2="{HEIGHT}" x1="-9" x2="-9"/></svg>'
    )
    labels = "".join(
        f'<li class="s{k}"><svg viewBox="0 0 26 8" aria-hidden="true"><path d="M0 4h26"/></svg>{text(label)}</li>'
        for k, label in enumerate(series)
    )
    if band is not None:
        labels += f'<li><i class="band"></i>target {_range(band)}</li>'
    return f'<figure><figcaption>{text(title)}</figcaption><ul class="legend">{labels}</ul>{svg}</figure>'


def _range(band: tuple[float, float]) -> str:
    return f"{band[0]:g} to {band[1]:g}"


def _grid(ticks: Iterable[tuple[float, str]]) -> str:
    """Lines at heights, with their labels."""
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT}H{WIDTH - RIGHT}"/>']
    for y, label in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}">{label}</text>')
    return "".join(parts)


def _below(names: Sequence[str], named: bool) -> str:
    """The layers under the axis: names, or some numbers."""
    count = len(names)
    if named:
        return "".join(
            f'<text class="name" transform="translate({place(k, count)} {HEIGHT + 12}) rotate(-38)">{text(name)}</text>'
            for k, name in enumerate(names)
        )
    step = next(s for s in (10, 20, 25, 50, 100, 250, 500, 1000, 10000, count) if count / s <= 14)
    ticks = "".join(
        f'<text class="number" x="{place(k - 1, count)}" y="{HEIGHT + 15}">{k}</text>'
        for k in (1, *range(step, count + 1, step))
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f'{ticks}<text class="number" x="{middle}" y="{HEIGHT + 31}">layer, in the order of execution</text>'


def _line(k: int, values: Sequence[float | None], axis: Axis, count: int) -> str:
    """A series: a line with gaps where a value is missing, and crosses at the edge for 0 and what is not finite."""
    line, dots, crosses, pen = [], [], [], "M"
    for at, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        x, y = place(at, count), axis.y(value)
        if not 0 < value < math.inf:
            y = HEIGHT - 4 if value <= 0 else TOP + 4
            crosses.append(f"M{x - 3} {y - 3}l6 6m0-6l-6 6")
            pen = "M"
            continue
        line.append(f"{pen}{x:g} {y:g}")
        dots.append(f"M{x:g} {y:g}h0")
        pen = "L"
    parts = [f'<path class="line" d="{"".join(line)}"/>' if line else ""]
    if count <= MOST_MARKERS and dots:
        parts.append(f'<path class="dots" d="{"".join(dots)}"/>')
    if crosses:
        parts.append(f'<path class="crosses" d="{"".join(crosses)}"/>')
    return f'<g class="s{k}">{"".join(parts)}</g>'


def _told(title: str, names: Sequence[str], series: Series) -> str:
    """The chart in words."""
    parts = [f"{title}, {len(names)} layers."]
    for label, values in series.items():
        known = [(v, k) for k, v in enumerate(values) if v is not None and math.isfinite(v)]
        if known:
            low, high = min(known), max(known)
            parts.append(f"{label}: from {low[0]:.3g} ({names[low[1]]}) to {high[0]:.3g} ({names[high[1]]}).")
    return " ".join([*parts, "Arrow keys go from layer to layer."])
