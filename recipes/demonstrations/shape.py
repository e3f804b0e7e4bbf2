"""Sizes of a data set, which data sets used together must share, and which an environment must match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from recipes.demonstrations.data_errors import DatasetError


class DatasetShape(NamedTuple):
    """Sizes of a data set's rows.

    Attributes:
        where: the file or folder.
        fps: rows per second; None: not recorded.
        action_size: numbers in an action.
        choices: whether actions are discrete.
        state_size: numbers in a state; 0 without states.
        cameras: (H, W, 3) by name.
    """

    where: str
    fps: float | None
    action_size: int
    choices: bool
    state_size: int
    cameras: Mapping[str, tuple[int, int, int]]


def check_alike(first: DatasetShape, other: DatasetShape) -> None:
    """Check that two data sets can be used together.

    Raises:
        DatasetError: the data sets differ in their rate, their cameras, the kind or size of actions, or the size of
            states.
    """
    for what, one, two in (
        ("rows per second (fps)", first.fps, other.fps),
        ("kinds of actions", *("discrete" if data.choices else "continuous" for data in (first, other))),
        ("numbers in an action", first.action_size, other.action_size),
        ("numbers in a state", first.state_size, other.state_size),
        ("cameras", dict(first.cameras), dict(other.cameras)),
    ):
        if one != two:
            raise DatasetError(
                f"the data sets have different {what}: {two}, but `{first.where}` has {one}",
                where=other.where,
                help="learn from data sets of one kind at a time",
            )
