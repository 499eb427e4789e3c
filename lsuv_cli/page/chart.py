"""Line charts as SVG: one value for each layer, in the order of execution, on a log axis.

Paths are drawn in whole numbers, layers across and tenths of a unit down, and scaled by a transform: with five lines of
500 layers the digits of coordinates would be a large part of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from lsuv_cli.labels import distinct, elided, label
from lsuv_cli.page.markup import text
from lsuv_cli.text import plural

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 960, 230, 58, 12, 10
NAME_HEIGHT, NUMBER_HEIGHT = 22, 36  # below the axis, for names (and 4 for each letter) and for numbers of layers
LONGEST_NAME, LONGEST_TOLD = 20, 80
MOST_NAMES, MOST_MARKERS = 32, 120  # layers that are named on the axis; layers whose points are marked
MOST_TICKS = 7
LETTER = 5.2  # how far a letter of a slanted name reaches to the left
MOST_BARS = 200  # that stand side by side; more series get a strip each
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


@dataclass(frozen=True)
class _Title:
    """What a chart is called, and what its values are of."""

    key: str
    title: str
    noun: str = "layer"


def chart(
    key: str,
    title: str,
    names: Sequence[str],
    series: Series,
    band: tuple[float, float] | None = None,
    noun: str = "layer",
) -> str:
    """A chart with a legend; `band` is the range of values that is good, `noun` what there is a value for."""
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
    crossed = any(v is not None and not 0 < v < math.inf for values in series.values() for v in values)
    marks = f'<li><i class="band"></i>target {_range(band)}</li>' if band is not None else ""
    marks += "<li>&times; zero, at the bottom; not finite, at the top</li>" if crossed else ""
    return _figure(_Title(key, title, noun), names, series, "".join(parts), marks)


def bars(key: str, title: str, names: Sequence[str], series: Series) -> str:
    """A chart of fractions on a linear axis: bars, side by side where there are several series, or in strips."""
    top = max((v for values in series.values() for v in values if v is not None), default=0.0)
    step = next((s for s in (0.01, 0.02, 0.05, 0.1) if top / s <= MOST_TICKS - 1), 0.2)
    high = max(math.ceil(top / step) * step, step)
    in_strips = len(series) > 1 and len(names) * len(series) > MOST_BARS
    strips = len(series) if in_strips else 1
    tall = (HEIGHT - TOP) / strips
    cell = (WIDTH - LEFT - RIGHT) / max(len(names), 1)
    wide = min(cell * 0.7, 40.0) / (1 if in_strips else len(series))

    def y(value: float, strip: int = 0) -> float:
        return round(TOP + tall * (strip + 1 - 0.92 * value / high if in_strips else 1 - value / high), 1)

    ticks = [(y(k * step), f"{k * step:.0%}") for k in range(round(high / step) + 1)]
    if in_strips:
        ticks = [(y(part, strip), f"{high:.0%}" if part else "") for strip in range(strips) for part in (0.0, high)]
    parts = [_grid(ticks)]
    for k, values in enumerate(series.values()):
        strip, shift = (k, 0.0) if in_strips else (0, (k - (len(series) - 1) / 2) * wide)
        base, drawn, last = _tenths(y(0, strip)), "", (0, 0)
        for at, value in enumerate(values):
            if value:
                up = base - _tenths(y(value, strip))
                drawn += f"m{at - last[0]} {last[1]}v-{up}" if drawn else f"M{at} {base}v-{up}"
                last = (at, up)
        path = f'<path class="bars" stroke-width="{wide / cell:.3f}" d="{drawn}"/>'
        parts.append(f'<g class="s{k}" {_scaled(len(names), shift)}>{path}</g>')
    return _figure(_Title(key, title), names, series, "".join(parts))


def _tenths(y: float) -> int:
    return round(10 * y)


def _scaled(count: int, shift: float = 0.0) -> str:
    """The transform from layers and tenths of a unit."""
    return f'transform="matrix({(WIDTH - LEFT - RIGHT) / max(count, 1):.6g} 0 0 .1 {place(0, count) + shift:.6g} 0)"'


def _figure(told: _Title, names: Sequence[str], series: Series, drawn: str, marks: str = "") -> str:
    named = len(names) <= MOST_NAMES
    shown = _labels(names) if named else []
    height = HEIGHT + (NAME_HEIGHT + 4 * max(map(cell_len, shown), default=0) if named else NUMBER_HEIGHT)
    svg = (
        f'<svg id="{told.key}" class="chart" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" aria-label="{text(_told(told, names, series), 2000)}">'
        f"{drawn}{_named(shown) if named else _numbered(len(names), told.noun)}"
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT}" x1="-9" x2="-9"/></svg>'
    )
    labels = "".join(
        f'<li class="s{k}"><svg viewBox="0 0 26 8" aria-hidden="true"><path d="M0 4h26"/></svg>{text(name)}</li>'
        for k, name in enumerate(series)
    )
    return f'<figure><figcaption>{text(told.title)}</figcaption><ul class="legend">{labels}{marks}</ul>{svg}</figure>'


def _labels(names: Sequence[str]) -> list[str]:
    """Names under the axis, as long as there is room for the first of them."""
    room = math.floor(place(0, len(names)) / LETTER)
    return distinct([label(name) for name in names], min(LONGEST_NAME, room))


def _range(band: tuple[float, float]) -> str:
    return f"{band[0]:g} to {band[1]:g}"


def _grid(ticks: Iterable[tuple[float, str]]) -> str:
    """Lines at heights, with their labels."""
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT}H{WIDTH - RIGHT}"/>']
    for y, shown in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}">{shown}</text>')
    return "".join(parts)


def _named(names: Sequence[str]) -> str:
    """The names of layers under the axis."""
    count = len(names)
    return "".join(
        f'<text class="name" transform="translate({place(k, count)} {HEIGHT + 12}) rotate(-38)">{text(name)}</text>'
        for k, name in enumerate(names)
    )


def _numbered(count: int, noun: str) -> str:
    """Some numbers of layers under the axis."""
    step = next(s for s in (10, 20, 25, 50, 100, 250, 500, 1000, 10000, count) if count / s <= 14)
    ticks = "".join(
        f'<text class="number" x="{place(k - 1, count)}" y="{HEIGHT + 15}">{k}</text>'
        for k in (1, *range(step, count + 1, step))
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f'{ticks}<text class="number" x="{middle}" y="{HEIGHT + 31}">{noun}, in the order of execution</text>'


def _line(k: int, values: Sequence[float | None], axis: Axis, count: int) -> str:
    """A series: a line with gaps where a value is missing, and crosses at the edge for 0 and what is not finite."""
    line, dots, crosses = [], [], []
    last: tuple[int, int] | None = None  # the point before, if there is a line from it
    for at, value in enumerate(values):
        if value is None or not 0 < value < math.inf:
            last = None
            if value is not None:
                x, y = place(at, count), HEIGHT - 4 if value <= 0 else TOP + 4
                crosses.append(f"M{x - 3:g} {y - 3}l6 6m0-6l-6 6")
            continue
        down = _tenths(axis.y(value))
        line.append(f"M{at} {down}l" if last is None else f" {at - last[0]}{down - last[1]:+d}")
        dots.append(f"M{at} {down}h0")
        last = (at, down)
    drawn = "".join(line).replace("l ", "l").replace("lM", "M").removesuffix("l")
    parts = [f'<path class="line" d="{drawn}"/>' if line else ""]
    if count <= MOST_MARKERS and dots:
        parts.append(f'<path class="dots" d="{"".join(dots)}"/>')
    scaled = f"<g {_scaled(count)}>{''.join(parts)}</g>" if line else ""
    crossed = f'<path class="crosses" d="{"".join(crosses)}"/>' if crosses else ""
    return f'<g class="s{k}">{scaled}{crossed}</g>'


def _told(told: _Title, names: Sequence[str], series: Series) -> str:
    """The chart in words."""
    parts = [f"{told.title}, {plural(len(names), told.noun)}."]
    for name, values in series.items():
        known = [(v, k) for k, v in enumerate(values) if v is not None and math.isfinite(v)]
        if known:
            low, high = min(known), max(known)
            first, last = (elided(label(names[at]), LONGEST_TOLD) for _, at in (low, high))
            parts.append(f"{name}: from {low[0]:.3g} ({first}) to {high[0]:.3g} ({last}).")
        if lost := sum(v is not None and not math.isfinite(v) for v in values):
            parts.append(f"{name}: not finite in {plural(lost, told.noun)}.")
    return " ".join([*parts, f"Arrow keys go from {told.noun} to {told.noun}."])
