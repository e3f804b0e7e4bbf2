"""Small pictures of curves, which a page shows until the chart library has drawn them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rlinf_cli.live.labels import figure
from rlinf_cli.report.charts import PALETTE
from rlinf_cli.report.series import Band, EvaluatedPoint

_WIDTH: Final = 1000
_HEIGHT: Final = 200
_MOST_POINTS: Final = 100


class Sketch(NamedTuple):
    """Curves as lines of an SVG.

    Attributes:
        size: width and height of the picture, in the units of its points.
        lines: colour and points of each line.
        words: the range of steps and values, in words.
    """

    size: tuple[int, int]
    lines: Sequence[tuple[str, str]]
    words: str


def sketch(series: Iterable[tuple[int, Sequence[Band] | Sequence[EvaluatedPoint]]]) -> Sketch:
    """Return curves, each with the number of its colour, as a sketch of at most 100 points each."""
    curves = [(number, _thinned(points)) for number, points in series]
    steps = [step for _, curve in curves for step, _ in curve]
    values = [value for _, curve in curves for _, value in curve]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> str:
        x = _WIDTH * (step - first) / max(last - first, 1)
        y = _HEIGHT * (1 - (value - low) / ((high - low) or 1.0))
        return f"{x:.0f},{y:.0f}"

    lines = [(PALETTE[number % len(PALETTE)], " ".join(place(*point) for point in curve)) for number, curve in curves]
    return Sketch((_WIDTH, _HEIGHT), lines, f"steps {first} to {last}, values {figure(low)} to {figure(high)}")


def _thinned(points: Sequence[Band] | Sequence[EvaluatedPoint]) -> list[tuple[int, float]]:
    """Return some of the points as step and value: the last, and others as far apart."""
    stride = -(-len(points) // _MOST_POINTS)
    chosen = reversed(points[::-1][::stride])
    return [(point.step, point.mean if isinstance(point, Band) else point.value) for point in chosen]
