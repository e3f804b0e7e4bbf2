"""A replay buffer in memory: a ring of transitions for each environment, and n-step returns made when they are sampled.

Each lane of the buffer is the history of one environment, and row after row holds what was observed, done and rewarded:

    row      0    1    2    3    4    5    6
             o a  o a  o a  o    o a  o a  o
             moves          end  moves     newest

The observation after a step is that of the next row, so that an image is stored once. Behind the last step of an
episode is a row with its final observation alone, and behind the newest step one with the present observation; neither
is ever sampled. What is oldest is overwritten first, so that all rows after a transition are there as long as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.replay.images import CompressedImages
from recipes.embodied.replay.sum_tree import SumTree
from recipes.embodied.replay.types import Arrays, ReplayBatch, Rows, Transitions, TransitionSpec
from rlinf_core import RLinfError

# Bits of a row's flags: a step was made from here; the task ended with it; the episode did.
MOVES, TERMINATED, ENDED = 1, 2, 4
# The fewest rows of a lane: a step, its final observation, and one of the next episode.
SMALLEST_LANE: Final = 4
# Added to errors, so that every transition is sampled some time.
_LEAST_ERROR: Final = 1e-6
_ACTIONS, _REWARDS, _FLAGS, _OBSERVED = "actions", "rewards", "flags", "observations/"
_COMPRESSED: Final = "compressed/"


class ReplayError(RLinfError):
    """A replay buffer cannot be made, filled or read."""


class Prioritization:
    """Settings of prioritised sampling (Schaul et al. 2016): P(i) ~ (|error| + 1e-6)^alpha, weights (N P(i))^-beta.

    Args:
        alpha: 0 is uniform, 1 proportional to the error.
        beta: 1 corrects all of the bias, 0 none.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4) -> None:
        self.alpha, self.beta = alpha, beta


class ReplayBuffer:
    """Transitions of some environments, the newest `capacity` rows of them.

    Args:
        spec: the columns.
        lanes: number of environments.
        capacity: rows over all lanes; a lane has an equal share of them. An episode takes one more than its steps.
        prioritized: sample by errors; None: uniformly.
        image_bytes: compress images, and forget the oldest rows where they would take more than this; None: images
            are kept as they are.

    Raises:
        ReplayError: there are fewer than 4 rows for each environment, or the memory cannot be had.
    """

    def __init__(
        self,
        spec: TransitionSpec,
        lanes: int,
        capacity: int,
        prioritized: Prioritization | None = None,
        image_bytes: int | None = None,
    ) -> None:
        self.spec, self.lanes = spec, lanes
        self.rows_of_lane = size = capacity // lanes
        if size < SMALLEST_LANE:
            raise ReplayError(
                f"a replay buffer of {capacity} rows is too small for {lanes} environments",
                help=f"it needs {SMALLEST_LANE * lanes} or more",
            )
        shape = (lanes * size,)
        self._image_bytes = image_bytes
        self._images = {
            name: CompressedImages(lanes * size, column.shape)
            for name, column in spec.observations.items()
            if image_bytes is not None and column.is_image
        }
        least = SMALLEST_LANE * lanes * sum(spec.observations[name].nbytes for name in self._images)
        if image_bytes is not None and image_bytes < least:
            raise ReplayError(
                f"{image_bytes} bytes are too few for the images of {lanes} environments",
                help=f"it needs {least} or more; raise `replay.image_memory_gib`",
            )
        try:
            self._observations: dict[str, NDArray[Any] | CompressedImages] = {
                name: self._images[name] if name in self._images else np.zeros((*shape, *column.shape), column.dtype)
                for name, column in spec.observations.items()
            }
            self._actions = np.zeros((*shape, *spec.actions.shape), spec.actions.dtype)
            self._rewards = np.zeros(shape, np.float32)
            self._flags = np.zeros(shape, np.uint8)
        except MemoryError as error:
            raise ReplayError(f"a replay buffer of {spec.bound(capacity)} bytes finds no memory") from error
        # Per lane: the row that the next step is written to, rows that were ever written, and whether an episode is
        # under way, whose present observation is in the row `head`.
        self._head = np.zeros(lanes, np.int64)
        self._used = np.zeros(lanes, np.int64)
        self._open = np.zeros(lanes, np.bool_)
        # Per lane, counted since the beginning: steps of the head, and the first row that is not forgotten.
        self._advanced, self._first = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._count = 0
        self._prioritized = prioritized
        self._tree = None if prioritized is None else SumTree(lanes * size)
        self._largest = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of its columns."""
        columns = (*self._observations.values(), self._actions, self._rewards, self._flags)
        return sum(each.nbytes for each in columns)

    def __len__(self) -> int:
        """Return how many transitions can be sampled."""
        return self._count

    @property
    def rows(self) -> Rows:
        """int64 [len(self)], all rows that can be sampled."""
        return np.flatnonzero(self._flags & MOVES)

    def add(self, steps: Transitions, lanes: Rows | None = None) -> None:
        """Add one step of some environments.

        Where the observation before the step is not the one after the last step of that lane, the episode before was
        left unfinished: it counts as cut off there.

        Args:
            steps: n of them.
            lanes: int64 [n], different ones; None: all in their order.
        """
        lanes = np.arange(self.lanes) if lanes is None else lanes
        if not len(lanes):
            return
        self._cut_off(lanes[~self._continues(lanes, steps.observations)])
        rows = self._occupy(lanes)
        for name, column in self._observations.items():
            column[rows] = steps.observations[name]
        self._actions[rows] = steps.actions
        self._rewards[rows] = steps.rewards
        ended = steps.terminations | steps.truncations
        self._flags[rows] = MOVES + TERMINATED * steps.terminations + ENDED * ended
        self._count += len(rows)
        self._advance(lanes)
        present = self._occupy(lanes)
        for name, column in self._observations.items():
            column[present] = steps.next_observations[name]
        self._open[lanes] = ~ended
        self._advance(lanes[ended])
        if self._tree is not None:
            self._tree.set(rows, np.full(len(rows), self._largest))
        self._forget()

    def _forget(self) -> None:
        """Forget the oldest rows until the images keep to their bytes."""
        while sum(each.nbytes for each in self._images.values()) > (self._image_bytes or 0):
            self._first = np.maximum(self._first, self._advanced + 1 - self.rows_of_lane)
            lane = int(np.argmax(self._advanced - self._first))
            row = self._rows(np.array([lane]), self._first[[lane]] % self.rows_of_lane)
            self._clear(row)
            for each in self._images.values():
                each.drop(row)
            self._first[lane] += 1

    def cut_off(self) -> None:
        """End the episodes that are under way, as cut off: what is added next does not follow from them."""
        self._cut_off(np.flatnonzero(self._open))

    def _cut_off(self, lanes: Rows) -> None:
        lanes = lanes[self._open[lanes]]
        before = self._rows(lanes, (self._head[lanes] - 1) % self.rows_of_lane)
        self._flags[before] |= ENDED
        self._open[lanes] = False
        self._advance(lanes)

    def _continues(self, lanes: Rows, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return bool [n], whether observations are those that the episodes under way were left with."""
        found = self._open[lanes].copy()
        rows = self._rows(lanes, self._head[lanes])
        for name, column in self._observations.items():
            same = column[rows] == observations[name]
            found &= same.reshape(len(lanes), -1).all(axis=1)
        return found

    def _rows(self, lanes: Rows, slots: Rows) -> Rows:
        return lanes * self.rows_of_lane + slots

    def _advance(self, lanes: Rows) -> None:
        self._head[lanes] = (self._head[lanes] + 1) % self.rows_of_lane
        self._advanced[lanes] += 1

    def _occupy(self, lanes: Rows) -> Rows:
        """Clear the next row of some lanes, which is about to be written, and return these rows."""
        rows = self._rows(lanes, self._head[lanes])
        self._clear(rows)
        self._used[lanes] = np.maximum(self._used[lanes], self._head[lanes] + 1)
        return rows

    def _clear(self, rows: Rows) -> None:
        """Make rows such as are never sampled."""
        self._count -= int((self._flags[rows] & MOVES).sum())
        self._flags[rows] = 0
        if self._tree is not None:
            self._tree.set(rows, np.zeros(len(rows)))

    def sample(self, count: int, random: np.random.Generator) -> tuple[Rows, NDArray[np.float32]]:
        """Draw rows with replacement.

        Args:
            count: n.
            random: the only source of randomness: equal states of it and of the buffer give equal rows.

        Returns:
            The rows, int64 [n], and the weights of their losses, float32 [n], at most 1.

        Raises:
            ReplayError: there are no transitions.
        """
        if not self._count:
            raise ReplayError("nothing can be sampled from an empty replay buffer")
        if self._tree is None or self._prioritized is None:
            return self._uniform(count, random), np.ones(count, np.float32)
        total = self._tree.total
        # One from each of n equal parts: the batch is spread over all priorities.
        rows = self._tree.find((np.arange(count) + random.random(count)) * (total / count))
        weights = (self._count * self._tree.get(rows) / total) ** -self._prioritized.beta
        return rows, (weights / weights.max()).astype(np.float32)

    def _uniform(self, count: int, random: np.random.Generator) -> Rows:
        # Rows that were forgotten are never drawn; without such all that were ever written are.
        first, held = self._first, self._used
        if first.any():
            first = np.maximum(first, self._advanced + 1 - self.rows_of_lane)
            held = self._advanced + 1 - first
        ends = np.cumsum(held)
        found = np.empty(0, np.int64)
        # Rows without a step are drawn again: there is one for each episode.
        while len(found) < count:
            drawn = random.integers(ends[-1], size=count - len(found))
            lanes = np.searchsorted(ends, drawn, side="right")
            rows = self._rows(lanes, (drawn - ends[lanes] + held[lanes] + first[lanes]) % self.rows_of_lane)
            found = np.concatenate((found, rows[(self._flags[rows] & MOVES) > 0]))
        return found

    def gather(self, rows: Rows, weights: NDArray[np.float32], steps: int, discount: float) -> ReplayBatch:
        """Return transitions of up to `steps` steps.

        A transition is shorter where its episode ends, or where the environment has not come further yet. Its last
        observation counts, discounted by as many steps as there are, unless the task ended with the last of them.

        Args:
            rows: int64 [n], of `sample`.
            weights: float32 [n], likewise.
            steps: k, at least 1.
            discount: of rewards, by step.
        """
        lanes, at = np.divmod(rows, self.rows_of_lane)
        going = np.ones(len(rows), np.bool_)
        rewards, discounts = np.zeros(len(rows)), np.ones(len(rows))
        for _ in range(steps):
            here = self._rows(lanes, at)
            flags = self._flags[here]
            going &= (flags & MOVES) > 0
            rewards += np.where(going, discounts * self._rewards[here], 0)
            ended = going & ((flags & TERMINATED) > 0)
            discounts *= np.where(going, discount, 1) * ~ended
            at = np.where(going, (at + 1) % self.rows_of_lane, at)
            going &= (flags & ENDED) == 0
        last = self._rows(lanes, at)
        return ReplayBatch(
            {name: column[rows] for name, column in self._observations.items()},
            self._actions[rows],
            rewards.astype(np.float32),
            discounts.astype(np.float32),
            {name: column[last] for name, column in self._observations.items()},
            rows,
            weights,
        )

    def update_priorities(self, rows: Rows, errors: NDArray[Any]) -> None:
        """Give sampled rows the priorities of their errors, float [n]; rows that were overwritten since stay as new."""
        if self._tree is None or self._prioritized is None:
            return
        kept = (self._flags[rows] & MOVES) > 0
        priorities = (np.abs(errors[kept]).astype(np.float64) + _LEAST_ERROR) ** self._prioritized.alpha
        if len(priorities):
            self._largest = max(self._largest, float(priorities.max()))
            self._tree.set(rows[kept], priorities)

    def save(self) -> Arrays:
        """Return everything as arrays by name; memory beyond what was ever written is left out."""
        size = int(self._used.max(initial=0))
        columns = self._columns()
        if self._tree is not None:
            columns["priorities"] = self._tree.priorities
        shape = (self.lanes, self.rows_of_lane)
        found = {name: column.reshape(*shape, *column.shape[1:])[:, :size].copy() for name, column in columns.items()}
        sizes = {"head": self._head.copy(), "used": self._used.copy(), "open": self._open.copy()}
        if self._images:
            sizes |= {"advanced": self._advanced.copy(), "first": self._first.copy()}
        for name, column in self._images.items():
            found |= {f"{_COMPRESSED}{name}/{part}": array for part, array in column.save().items()}
        return {**found, **sizes, "largest": np.array(self._largest), "size": np.array(self.rows_of_lane)}

    def _columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns that are plain arrays, by name."""
        plain = {name: each for name, each in self._observations.items() if not isinstance(each, CompressedImages)}
        own = {_ACTIONS: self._actions, _REWARDS: self._rewards, _FLAGS: self._flags}
        return {**{f"{_OBSERVED}{name}": each for name, each in plain.items()}, **own}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take the state that `save` returned; sampling goes on as it would have.

        Raises:
            ReplayError: it is of a buffer with other sizes, columns or sampling.
        """
        wanted = self.save()
        fits = set(state) == set(wanted) and int(state["size"]) == self.rows_of_lane
        fits = fits and all(
            name.startswith(_COMPRESSED)
            or (
                state[name].dtype == each.dtype
                and len(np.atleast_1d(state[name])) == len(np.atleast_1d(each))
                and state[name].shape[2:] == each.shape[2:]
            )
            for name, each in wanted.items()
        )
        if not fits:
            raise ReplayError(
                "the saved replay buffer is of another kind",
                why="the environments, their number, the capacity or the way of sampling have changed",
                help="write the values that the run was begun with; `config.yaml` in its folder has them",
            )
        for name, column in self._columns().items():
            whole = column.reshape(self.lanes, self.rows_of_lane, *column.shape[1:])
            saved = state[name]
            whole[:, : saved.shape[1]] = saved
            whole[:, saved.shape[1] :] = 0
        self._head, self._used = state["head"].copy(), state["used"].copy()
        self._open = state["open"].copy()
        if self._images:
            self._advanced, self._first = state["advanced"].copy(), state["first"].copy()
        for name, images in self._images.items():
            prefix = f"{_COMPRESSED}{name}/"
            images.load({part.removeprefix(prefix): each for part, each in state.items() if part.startswith(prefix)})
        self._count = int((self._flags & MOVES).sum())
        self._largest = float(state["largest"])
        if self._tree is not None:
            priorities = np.zeros((self.lanes, self.rows_of_lane))
            priorities[:, : state["priorities"].shape[1]] = state["priorities"]
            self._tree.set(np.arange(priorities.size), priorities.ravel())
