"""Plots as SVG, drawn here: lines with marks, and dots with intervals. No script, no library.

Colours are classes (`s0` to `s5`), so that the page's style says what they are in light and dark.
Everything that comes from outside is escaped. Notable: the scale of shares need not begin at 0, so
figures side by side are dots: a bar's length would lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 42
COLOURS = 6
MOST_STEPS = 5
"""Steps of a tenth that a scale of shares has at most; beyond, they are of two tenths."""


@dataclass(frozen=True, slots=True)
class Line:
    """A series of (x, y), ascending in x, in one of COLOURS; `dashed`: another kind of figure."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A value with its interval, or without."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels along one side."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def pixel(self, value: float) -> float:
        """Where a value is drawn."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def line_plot(
    title: str,
    lines: Sequence[Line],
    x_name: str,
    *,
    log: bool = False,
    span: tuple[float, float] | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """Shares from 0 to 1 by a number, over `span` (None: as far as the points go).

    `mark` is an x to point out, and what it is.
    """
    xs = [x for line in lines for x, _ in line.points]
    if mark is not None:
        xs.append(mark[0])
    low, high = span or (min(xs), max(xs))
    x = Scale(low, high, LEFT, WIDTH - RIGHT, log)
    y = _shares_scale(value for line in lines for _, value in line.points)
    parts = [*_grid(y), *_x_ticks(x), _x_name(x_name)]
    if mark is not None:
        at = f"{x.pixel(mark[0]):.1f}"
        parts.append(f'<path class="mark" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>')
        near_end = x.pixel(mark[0]) > WIDTH / 2
        shift, anchor = (-5, "end") if near_end else (5, "start")
        parts.append(
            f'<text class="marked" x="{x.pixel(mark[0]) + shift:.1f}" y="{HEIGHT - BOTTOM - 7}" '
            f'text-anchor="{anchor}">{escape(mark[1])}</text>'
        )
    for line in lines:
        parts += _drawn(line, x, y)
    return _figure(title, parts, [(line.name, line.colour, line.dashed) for line in lines])


def dot_plot(title: str, groups: Mapping[str, Sequence[Dot]], names: Sequence[str]) -> str:
    """Dots side by side for each group, one for each of `names`, with their intervals."""
    dots = [dot for group in groups.values() for dot in group]
    y = _shares_scale(dot.value if dot.low is None else dot.low for dot in dots)
    parts = [*_grid(y)]
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    apart = min(room * 0.7 / max(len(names), 1), 18)
    for place, (group, own) in enumerate(groups.items()):
        middle = LEFT + room * (place + 0.5)
        parts += _group_name(group, middle)
        for number, dot in enumerate(own):
            x = middle + apart * (number - (len(own) - 1) / 2)
            parts += _dot(dot, x, y, number % COLOURS, f"{group}, {names[number]}")
    keys = [(name, place % COLOURS, False) for place, name in enumerate(names)]
    return _figure(title, parts, keys)


def _shares_scale(values: Iterator[float]) -> Scale:
    """From a round share below all values to 1, in whole steps of `_grid`."""
    tenths = max(0, math.floor((min(values, default=0.0) - 0.02) * 10))
    low = tenths / 10 if tenths >= 10 - MOST_STEPS else tenths // 2 / 5
    return Scale(min(low, 0.8), 1.0, HEIGHT - BOTTOM, TOP)


def _grid(y: Scale) -> Iterator[str]:
    steps = round((y.high - y.low) * 10)
    every = 2 if steps > MOST_STEPS else 1
    for tick in range(0, steps + 1, every):
        share = y.low + tick / 10
        at = f"{y.pixel(share):.1f}"
        yield f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 7}" y="{at}" dy=".35em" text-anchor="end">{share:.0%}</text>'


def _x_ticks(x: Scale) -> Iterator[str]:
    for tick in _log_ticks(x) if x.log else _round_ticks(x):
        said = f"{tick:,.0f}" if x.log else f"{tick:.4g}"
        at = x.pixel(tick)
        # The outermost names would stick out.
        anchor = "start" if at < LEFT + 6 else "end" if at > WIDTH - RIGHT - 12 else "middle"
        yield (
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{said}</text>'
        )


def _log_ticks(x: Scale) -> list[float]:
    """1, 2 and 5 times powers of ten inside, at most as many as have room."""
    powers = range(math.floor(math.log10(x.low)), math.ceil(math.log10(x.high)) + 1)
    found = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    inside = [tick for tick in found if x.low <= tick <= x.high]
    if len(inside) > 7:
        inside = [tick for tick in inside if f"{tick:g}"[0] == "1"]
    return inside or [x.low, x.high]


def _round_ticks(x: Scale) -> list[float]:
    """Three to seven multiples of a round number inside."""
    room = (x.high - x.low) / 3 or 1.0
    power = 10.0 ** math.floor(math.log10(room))
    step = next(times * power for times in (5, 2, 1) if times * power <= room)
    first, last = math.ceil(x.low / step - 1e-9), math.floor(x.high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def _x_name(name: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    place = f'x="{middle}" y="{HEIGHT - 6}" text-anchor="middle"'
    return f'<text class="name" {place}>{escape(name)}</text>'


def _drawn(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    places = [(x.pixel(px), y.pixel(py)) for px, py in line.points]
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    dashed = " dashed" if line.dashed else ""
    yield f'<path class="line s{line.colour}{dashed}" d="M{path}"/>'
    for (px, py), (value, share) in zip(places, line.points, strict=True):
        said = f"{escape(line.name)}: {share:.1%} at {value:,.4g}"
        place = f'cx="{px:.1f}" cy="{py:.1f}" r="2.6"'
        yield f'<circle class="s{line.colour}" {place}><title>{said}</title></circle>'


def _dot(dot: Dot, x: float, y: Scale, colour: int, said: str) -> Iterator[str]:
    told = f"{said}: {dot.value:.1%}"
    if dot.low is not None and dot.high is not None:
        told += f" ({dot.low:.1%} to {dot.high:.1%})"
        ends = f"M{x:.1f} {y.pixel(dot.low):.1f}V{y.pixel(dot.high):.1f}"
        yield f'<path class="whisker s{colour}" d="{ends}"/>'
    place = f'cx="{x:.1f}" cy="{y.pixel(dot.value):.1f}" r="4"'
    yield f'<circle class="s{colour}" {place}><title>{escape(told)}</title></circle>'


def _group_name(name: str, middle: float) -> Iterator[str]:
    """A name below its dots, a word of more than one on a line of its own."""
    words = name.rsplit(" ", 1) if len(name) > 9 else [name]
    for line, word in enumerate(words):
        at = HEIGHT - BOTTOM + 16 + 13 * line
        place = f'x="{middle:.1f}" y="{at}" text-anchor="middle"'
        yield f'<text class="group" {place}>{escape(word)}</text>'


def _figure(title: str, parts: Sequence[str], names: Sequence[tuple[str, int, bool]]) -> str:
    """A titled drawing with a key of names, colours, and whether they are dashed."""
    keys = "".join(
        f'<li><i class="s{colour}{" dashed" if dashed else ""}"></i>{escape(name)}</li>'
        for name, colour, dashed in names
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="key">{keys}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )
