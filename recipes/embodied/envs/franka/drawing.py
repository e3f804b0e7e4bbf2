"""Drawings of a Franka arm and of what lies around it, for videos: numpy alone, no renderer.

Two views side by side: from the side (forward to the right, up) and from above (forward up, left to the left).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.franka_kinematics import arm_points
from recipes.training.arrays import Array

# Height, and width of each of the two views, in pixels.
SIZE: Final = 128
# The square that each view shows: its left and lower edges and its length, in metres.
_SIDE_LEFT, _SIDE_LOW, _ABOVE_LEFT, _ABOVE_LOW, _LENGTH = -0.2, -0.08, -0.5, -0.15, 1.0
_PER_METRE: Final = SIZE / _LENGTH
Color: TypeAlias = tuple[int, int, int]
_COLORS: Final[dict[str, Color]] = {"red": (215, 50, 45), "green": (40, 165, 70)}
_BACKGROUND, _TABLE, _ARM, _JOINT, _HAND = (238, 238, 234), (200, 195, 185), (120, 125, 135), (70, 75, 85), (40, 40, 45)
_OPEN, _CLOSED = (150, 150, 150), (235, 150, 20)
# Radii of the arm's links, of its joints, of its hand and of the mark of closed fingers, in metres.
_ARM_RADIUS, _JOINT_RADIUS, _HAND_RADIUS, _TIP_RADIUS = 0.028, 0.016, 0.016, 0.013


class Spot(NamedTuple):
    """A thing drawn as a disc.

    Attributes:
        place: [3, n], in metres from the arm's base.
        radius: the radius in metres.
        color: the color of the disc.
    """

    place: Array
    radius: float
    color: Literal["red", "green"]


def draw_arm(joints: Array, spots: Sequence[Spot], closed: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return pictures of n arms, uint8 [n, SIZE, 2 * SIZE, 3].

    Args:
        joints: [7, n], in radians.
        spots: what lies around.
        closed: bool [n], the fingers are closed: their tip is orange then.
    """
    points = arm_points(joints)
    pictures = np.empty((joints.shape[1], SIZE, 2 * SIZE, 3), np.uint8)
    for row, is_closed in enumerate(closed.tolist()):
        arm = points[:, :, row]
        for view in (0, 1):
            canvas = _Canvas(_TABLE if view else _BACKGROUND)
            if not view:
                canvas.fill_below(-_SIDE_LOW, _TABLE)
            *links, tip = [_seen(point, view) for point in arm]
            _paint_links(canvas, links, tip)
            # What is held is seen around the tip of the fingers.
            for spot in spots:
                place = _seen(spot.place[:, row], view)
                canvas.bar(place, place, spot.radius, _COLORS[spot.color])
            canvas.bar(tip, tip, _TIP_RADIUS, _CLOSED if is_closed else _OPEN)
            pictures[row, :, view * SIZE : (view + 1) * SIZE] = canvas.pixels.round()
    return pictures


def _seen(place: Array, view: int) -> tuple[float, float]:
    """Return how far right of the left edge and how far above the lower edge a place [3] is, in metres."""
    x, y, z = place.tolist()
    return (-y - _ABOVE_LEFT, x - _ABOVE_LOW) if view else (x - _SIDE_LEFT, z - _SIDE_LOW)


def _paint_links(canvas: _Canvas, points: Sequence[tuple[float, float]], tip: tuple[float, float]) -> None:
    """Paint the arm between its points, and its hand up to the tip."""
    for begin, stop in pairwise(points):
        canvas.bar(begin, stop, _ARM_RADIUS, _ARM)
    for place in points:
        canvas.bar(place, place, _JOINT_RADIUS, _JOINT)
    canvas.bar(points[-1], tip, _HAND_RADIUS, _HAND)


class _Canvas:
    """A square picture of metres.

    Attributes:
        pixels: float32 [SIZE, SIZE, 3], the upper row first.
    """

    def __init__(self, color: Color) -> None:
        self.pixels = np.full((SIZE, SIZE, 3), color, np.float32)

    def fill_below(self, height: float, color: Color) -> None:
        """Paint everything up to a height above the lower edge, in metres."""
        self.pixels[SIZE - round(height * _PER_METRE) :] = color

    def bar(self, begin: tuple[float, float], end: tuple[float, float], radius: float, color: Color) -> None:
        """Paint a line with round ends whose edge is smooth; without a length it is a disc."""
        (x, y), (to_x, to_y) = begin, end
        margin = radius + 1 / _PER_METRE
        left, right = _pixels(min(x, to_x) - margin, max(x, to_x) + margin)
        low, high = _pixels(min(y, to_y) - margin, max(y, to_y) + margin)
        if left >= right or low >= high:
            return
        away_x = ((np.arange(left, right) + 0.5) / _PER_METRE - x)[None, :]
        away_y = ((np.arange(high - 1, low - 1, -1) + 0.5) / _PER_METRE - y)[:, None]
        along_x, along_y = to_x - x, to_y - y
        part = np.clip((away_x * along_x + away_y * along_y) / max(along_x**2 + along_y**2, 1e-9), 0, 1)
        away = np.hypot(away_x - part * along_x, away_y - part * along_y) - radius
        cover = np.clip(0.5 - away * _PER_METRE, 0, 1)[..., None]
        within = self.pixels[SIZE - high : SIZE - low, left:right]
        within += cover * (np.array(color) - within)


def _pixels(low: float, high: float) -> tuple[int, int]:
    """Return the first pixel of a stretch in metres, and the one after its last, within the picture."""
    return max(0, int(low * _PER_METRE)), min(SIZE, int(high * _PER_METRE) + 1)
