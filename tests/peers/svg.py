"""Line charts as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 430, 345
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 40, 119
COLOURS = ("#0b6e99", "#d1495b", "#7a7a7a", "#edae49", "#222222")


@dataclass(frozen=True)
class Line:
    """One curve. ``dashed`` marks a second case of the same thing."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis. Both axes begin and end at round numbers.

    Attributes:
        x_ticks: labelled values on the logarithmic x axis.
        log_y: whether the y axis is logarithmic. Otherwise it begins at 0.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    x_ticks: Sequence[float]
    log_y: bool = False

    def svg(self) -> str:
        """The chart as a group of elements."""
        values = [y for line in self.lines for _, y in line.points]
        ticks = _decades(values) if self.log_y else _steps(max(values))
        parts = [_text(WIDTH / 2, 20, self.title, "middle", 13, "bold")]
        for tick in ticks:
            y = self._y(tick, ticks)
            parts.append(_stroke([(LEFT, y), (WIDTH - RIGHT, y)], "#ddd", 1))
            parts.append(_text(LEFT - 6, y + 4, f"{tick:,g}", "end"))
        for tick in self.x_ticks:
            parts.append(_text(self._x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
        parts.append(_text(WIDTH / 2, HEIGHT - BOTTOM + 34, self.x_label, "middle"))
        for number, line in enumerate(self.lines):
            colour, dash = COLOURS[number % len(COLOURS)], "5 4" if line.dashed else ""
            points = [(self._x(x), self._y(max(y, ticks[0]), ticks)) for x, y in line.points]
            parts.append(_stroke(points, colour, 2, dash))
            y = HEIGHT - BOTTOM + 52 + 15 * number
            parts.append(_stroke([(LEFT, y - 4), (LEFT + 24, y - 4)], colour, 2, dash))
            parts.append(_text(LEFT + 30, y, line.name))
        return "".join(parts)

    def _x(self, value: float) -> float:
        low, high = log10(self.x_ticks[0]), log10(self.x_ticks[-1])
        return LEFT + 8 + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT - 16)

    def _y(self, value: float, ticks: Sequence[float]) -> float:
        low, high = ticks[0], ticks[-1]
        if self.log_y:
            low, high, value = log10(low), log10(high), log10(value)
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def page(charts: Sequence[Chart]) -> str:
    """An SVG file with the charts side by side on white."""
    width = WIDTH * len(charts)
    groups = (
        f'<g transform="translate({WIDTH * number} 0)">{chart.svg()}</g>\n'
        for number, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        'font-family="sans-serif" font-size="11" fill="#222">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>\n{"".join(groups)}</svg>\n'
    )


def _steps(greatest: float) -> list[float]:
    size = 10.0 ** floor(log10(greatest))
    step = next(each * size for each in (0.1, 0.2, 0.5, 1, 2) if greatest / (each * size) <= 8)
    return [step * number for number in range(ceil(greatest / step) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    low = floor(log10(min(value for value in values if value > 0)))
    return [10.0**power for power in range(low, ceil(log10(max(values))) + 1)]


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 11, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>\n'
    )


def _stroke(
    points: Sequence[tuple[float, float]], colour: str, width: float, dash: str = ""
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    shape = f'points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}'
    return f"<polyline {shape}/>\n"
