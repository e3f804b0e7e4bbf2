"""Demonstrations in memory, independent of their format: numbers are loaded, images are read on demand.

A recorded episode is either terminated by its task or truncated. Success is a separate column that implies neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import MODES, DatasetError, DatasetShape, Flip, check_alike
from recipes.training.arrays import Array


def truths(values: Array, name: str, place: Callable[[int], str]) -> NDArray[np.bool_]:
    """Return a column as bool [N].

    Args:
        values: booleans, or the numbers 0 and 1.
        name: the name of the column.
        place: returns the location of a row, for errors.

    Raises:
        DatasetError: a value is neither 0 nor 1.
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
        terminations: bool [N], the task ended.
        truncations: bool [N], the episode was truncated, or its recording stops.
        assumed: bool [N], an end whose kind no column tells: a termination or a truncation is assumed.
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
    """Return how the episodes of a data set end; None if no column says so.

    A column of terminations is trusted. Without one, the task ended where an episode is done (or, without a `done`
    column, where its recording stops) and was not truncated. If `truncated` is missing too, `done` means a termination,
    as in robomimic and in LeRobot's own replay buffer. With `success` alone, a solved episode is terminated, and any
    other is truncated.

    Args:
        last: int64 [E], the last row of each episode.
        done: bool [N], the episode is over, for whatever reason. For this and the next three, None: no such column.
        terminated: bool [N], the task ended.
        truncated: bool [N], the episode was truncated.
        success: bool [N], the task is solved.
    """
    # Every recording has ends: a column that is never true was not filled in.
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


Rows = NDArray[np.int64]
# By name: mean, std, min, max, count and quantiles: [D] for numbers; [3, 1, 1] for images, scaled to 0 to 1.
Statistics: TypeAlias = dict[str, Array]
Number = TypeVar("Number", np.uint8, np.float32)


@dataclass(frozen=True)
class Camera:
    """The images of one camera over all rows of a data set.

    Attributes:
        shape: (H, W, 3).
        read: returns images [n, H, W, 3] of some rows, in the order of the rows. Raises DatasetError: an image is
            missing or damaged.
    """

    shape: tuple[int, int, int]
    read: Callable[[Rows], NDArray[np.uint8]]

    def flipped(self, flip: Flip) -> Camera:
        """Return the camera with its images flipped."""
        return Camera(self.shape, lambda rows: flipped(self.read(rows), flip))

    def chosen(self, rows: Rows) -> Camera:
        """Return the camera restricted to some rows."""
        return Camera(self.shape, lambda chosen: self.read(rows[chosen]))


class JoinedSet(NamedTuple):
    """One of the data sets that were joined.

    Attributes:
        where: its file or folder.
        episodes: the number of its episodes.
        flip: how its images were flipped when they were read; None: not at all.
    """

    where: str
    episodes: int
    flip: Flip | None


@dataclass(frozen=True)
class Demonstrations:
    """N rows of concatenated episodes.

    Attributes:
        where: the file or folder.
        fps: rows per second; None: not recorded.
        bounds: int64 [E + 1], the first row of every episode, and N.
        actions: [N, A], float32, or int64 for discrete actions.
        states: float32 [N, S]; None: no states.
        cameras: the cameras by name.
        tasks: the different instructions.
        task_of: int64 [N], which of them.
        statistics: the statistics of `action` and `observation.state`, as the data set says; None: it has none.
        rewards: float32 [N], after each action; None: there are none.
        successes: bool [N], whether the task is solved after each action; None: the data set does not say.
        ends: how the episodes end; None: the data set does not say.
        interventions: bool [N], whether the action is that of somebody who had taken over from a policy; None: the
            data set does not say.
        frame_ages: float32 [N] by camera: seconds from a frame to the observation that has it; empty: the data set does
            not say.
        numbers: int64 [E], what the data set calls its episodes; None: 0 to E - 1.
        draws: float64 [N], how often a row is drawn, relative to others; None: all alike.
        notes: conversions that lose something, and what is left out.
        place: the file that holds a row, and where in it; None: `where` is all that is known.
        flip: the turn that the data set says its pictures need, and once they are turned the one that was applied;
            None: it does not say.
        joined_from: data sets in the order of their episodes; empty: it is one.
    """

    where: str
    fps: float | None
    bounds: Rows
    actions: Array
    states: NDArray[np.float32] | None
    cameras: Mapping[str, Camera]
    tasks: tuple[str, ...]
    task_of: Rows
    statistics: Mapping[str, Statistics] | None = None
    rewards: NDArray[np.float32] | None = None
    successes: NDArray[np.bool_] | None = None
    ends: Ends | None = None
    interventions: NDArray[np.bool_] | None = None
    frame_ages: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    numbers: Rows | None = None
    draws: NDArray[np.float64] | None = None
    notes: tuple[str, ...] = ()
    place: Callable[[int], str] | None = None
    flip: Flip | None = None
    joined_from: tuple[JoinedSet, ...] = ()

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def episodes(self) -> int:
        """The number of episodes, E."""
        return len(self.bounds) - 1

    @property
    def shape(self) -> DatasetShape:
        """Sizes of the rows."""
        return DatasetShape(
            self.where,
            self.fps,
            self.actions.shape[1],
            self.actions.dtype.kind in "iu",
            0 if self.states is None else self.states.shape[1],
            {name: camera.shape for name, camera in self.cameras.items()},
        )

    @property
    def origins(self) -> tuple[JoinedSet, ...]:
        """The data sets that it consists of, in the order of their episodes."""
        return self.joined_from or (JoinedSet(self.where, self.episodes, self.flip),)

    def rows_of(self, episode: int) -> Rows:
        """Return the rows of an episode."""
        return np.arange(int(self.bounds[episode]), int(self.bounds[episode + 1]))

    def place_of(self, row: int) -> str:
        """Return the file that holds a row, the row's number in it, and its episode."""
        episode = int(np.searchsorted(self.bounds, row, side="right")) - 1
        number = episode if self.numbers is None else int(self.numbers[episode])
        file = f"{self.where}, row {row}" if self.place is None else self.place(row)
        return f"{file} (step {row - int(self.bounds[episode])} of episode {number})"

    def chosen(self, episodes: Sequence[int]) -> Demonstrations:
        """Return a subset of the episodes, by their numbers in the data set.

        Raises:
            DatasetError: there is no episode of such a number, or a number occurs twice.
        """
        known = list(range(self.episodes)) if self.numbers is None else self.numbers.tolist()
        wrong = [episode for episode in episodes if episode not in known]
        if wrong:
            raise DatasetError(
                f"episode {wrong[0]} does not exist",
                where=self.where,
                help=f"they are numbered {known[0]} to {known[-1]}",
            )
        if len(set(episodes)) < len(episodes):
            twice = next(episode for episode in episodes if episodes.count(episode) > 1)
            raise DatasetError(f"episode {twice} is named twice", where=self.where, help="name each episode once")
        positions = [known.index(episode) for episode in episodes]
        spans = [self.rows_of(position) for position in positions]
        rows = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        place = self.place
        placed: Callable[[int], str] | None = None if place is None else lambda row: place(int(rows[row]))

        def of(column: Array | None) -> Any:
            return None if column is None else column[rows]

        return replace(
            self,
            bounds=np.cumsum([0, *(len(span) for span in spans)]),
            actions=self.actions[rows],
            states=of(self.states),
            cameras={name: camera.chosen(rows) for name, camera in self.cameras.items()},
            task_of=self.task_of[rows],
            statistics=None,
            rewards=of(self.rewards),
            successes=of(self.successes),
            ends=None if self.ends is None else Ends(*map(of, self.ends)),
            interventions=of(self.interventions),
            frame_ages={camera: of(ages) for camera, ages in self.frame_ages.items()},
            numbers=np.array([known[position] for position in positions], np.int64),
            draws=of(self.draws),
            place=placed,
        )


def flipped(pictures: NDArray[Number], flip: Flip) -> NDArray[Number]:
    """Return flipped images [n, H, W, 3]; flipping twice restores them."""
    if flip in ("vertical", "rotate180"):
        pictures = pictures[:, ::-1]
    if flip in ("horizontal", "rotate180"):
        pictures = pictures[:, :, ::-1]
    return np.ascontiguousarray(pictures)


def joined(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Return several data sets as one.

    Raises:
        DatasetError: they differ in their rate, their cameras, or the size of actions or states.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        check_alike(first.shape, other.shape)
    offsets = np.cumsum([0, *(len(part) for part in parts)])

    def place(row: int) -> str:
        part = int(np.searchsorted(offsets, row, side="right")) - 1
        return parts[part].place_of(row - int(offsets[part]))

    tasks = tuple(dict.fromkeys(task for part in parts for task in part.tasks))
    task_of = [np.array([tasks.index(task) for task in part.tasks])[part.task_of] for part in parts]
    states = [part.states for part in parts if part.states is not None]
    ends = [part.ends for part in parts if part.ends is not None]
    bounds = [offset + part.bounds[:-1] for part, offset in zip(parts, offsets[:-1], strict=True)]
    return Demonstrations(
        ", ".join(part.where for part in parts),
        first.fps,
        np.concatenate([*bounds, offsets[-1:]]),
        np.concatenate([part.actions for part in parts]),
        np.concatenate(states) if len(states) == len(parts) else None,
        {name: _concatenated([part.cameras[name] for part in parts], offsets) for name in first.cameras},
        tasks,
        np.concatenate(task_of),
        rewards=_all([part.rewards for part in parts]),
        successes=_all([part.successes for part in parts]),
        ends=Ends(*map(np.concatenate, zip(*ends, strict=True))) if len(ends) == len(parts) else None,
        interventions=_interventions(parts),
        frame_ages={
            camera: np.concatenate([part.frame_ages[camera] for part in parts])
            for camera in first.frame_ages
            if all(camera in part.frame_ages for part in parts)
        },
        draws=_all([part.draws for part in parts]),
        notes=tuple(f"{part.where}: {note}" for part in parts for note in part.notes),
        place=place,
        joined_from=tuple(origin for part in parts for origin in part.origins),
    )


def _all(columns: Sequence[Array | None]) -> Array | None:
    """Concatenate columns; None if a data set lacks the column."""
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if len(present) == len(columns) else None


def _interventions(parts: Sequence[Demonstrations]) -> NDArray[np.bool_] | None:
    """Return the rows with interventions; None if no data set marks them. Data sets without marks count in full."""
    if all(part.interventions is None for part in parts):
        return None
    columns = [np.ones(len(part), np.bool_) if part.interventions is None else part.interventions for part in parts]
    return np.concatenate(columns)


def _concatenated(cameras: Sequence[Camera], offsets: Rows) -> Camera:
    """Return the cameras of several data sets as one."""
    shape = cameras[0].shape

    def read(rows: Rows) -> NDArray[np.uint8]:
        images = np.empty((len(rows), *shape), np.uint8)
        owners = np.searchsorted(offsets, rows, side="right") - 1
        for owner in np.unique(owners):
            mine = owners == owner
            images[mine] = cameras[owner].read(rows[mine] - offsets[owner])
        return images

    return Camera(shape, read)
