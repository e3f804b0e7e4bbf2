"""Ends of recorded episodes: terminated by the task, or cut off. Success is a third column, and decides neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.names import MODES
from recipes.training.arrays import Array


def truths(values: Array, name: str, place: Callable[[int], str]) -> NDArray[np.bool_]:
    """Return a column as bool [N].

    Args:
        values: booleans, or the numbers 0 and 1.
        name: the name of the column.
        place: returns the location of a row, for errors.

    Raises:
        DatasetError: a value is another number.
    """
    if name.rpartition("/")[2] in MODES:
        return values == 1
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row = int(wrong[0])
        raise DatasetError(
            f"`{name}` is {values[row]:g}; it must be 1 (true) or 0 (false)",
            where=place(row),
            help="correct the column, or name another one in `data.columns`",
        )
    return values.astype(np.bool_)


Flags: TypeAlias = NDArray[np.bool_]


class Ends(NamedTuple):
    """The ends of N rows; each is true after the action of its row.

    Attributes:
        terminations: bool [N], the task ended: nothing comes after it.
        truncations: bool [N], the episode was cut off, or its recording stops.
        assumed: bool [N], an end that no column tells apart from one of the other kind.
    """

    terminations: Flags
    truncations: Flags
    assumed: Flags


def ends_of(
    last: NDArray[np.int64],
    *,
    done: Flags | None,
    terminated: Flags | None,
    truncated: Flags | None,
    success: Flags | None,
) -> Ends | None:
    """Return how the episodes of a data set end; None: no column says anything about it.

    A column of terminations is believed. Else the task ended where an episode is done, or its recording stops, and it
    was not cut off. Done without a column of truncations is taken for an end by the task, as in robomimic and in
    LeRobot's own replay buffer. Where there is neither, a solved task has ended, and any other episode is cut off.

    Args:
        last: int64 [E], the last row of each episode.
        done: bool [N], the episode is over, for whatever reason; None: there is no such column, as for the others.
        terminated: bool [N], the task ended.
        truncated: bool [N], the episode was cut off.
        success: bool [N], the task is solved.
    """
    # Episodes do end: a column that is never true was not filled in.
    done = None if done is None or not done.any() else done
    columns = [column for column in (terminated, done, truncated, success) if column is not None]
    if not columns:
        return None
    at_end = np.zeros(len(columns[0]), np.bool_)
    at_end[last] = True
    cut = np.zeros_like(at_end) if truncated is None else truncated
    solved = np.zeros_like(at_end) if success is None else success
    assumed = np.zeros_like(at_end)
    if terminated is None and truncated is None:
        terminated = (at_end & solved) if done is None else done
        assumed = at_end & ~solved & (True if done is None else done)
    elif terminated is None:
        terminated = (at_end if done is None else done) & ~cut
    return Ends(terminated, (cut | at_end) & ~terminated, assumed)
