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
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.replay.observations import COMPRESSED, ObservationRows
from recipes.embodied.replay.replay_types import Arrays, ReplayBatch, ReplayError, Rows, Transitions, TransitionSpec
from recipes.embodied.replay.spilling import Spill
from recipes.embodied.replay.sum_tree import SumTree
from recipes.training.arrays import Array

# Bits of a row's flags: a step was made from here; the task ended with it; the episode did.
MOVES, TERMINATED, ENDED = 1, 2, 4
# The fewest rows of a lane: a step, its final observation, and one of the next episode.
SMALLEST_LANE: Final = 4
# Added to errors, so that every transition is sampled some time.
_LEAST_ERROR: Final = 1e-6
_ACTIONS, _REWARDS, _FLAGS = "actions", "rewards", "flags"


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
        spill: keep the rest of the observations in files; None: everything is in memory. Not with `image_bytes`.

    Raises:
        ReplayError: there are fewer than 4 rows for each environment, or memory or disk have no room.
    """

    def __init__(
        self,
        spec: TransitionSpec,
        lanes: int,
        capacity: int,
        prioritized: Prioritization | None = None,
        image_bytes: int | None = None,
        spill: Spill | None = None,
    ) -> None:
        self.spec, self.lanes = spec, lanes
        self.rows_of_lane = size = capacity // lanes
        if size < SMALLEST_LANE:
            raise ReplayError(
                f"a replay buffer of {capacity} rows is too small for {lanes} environments",
                help=f"it needs at least {SMALLEST_LANE * lanes}",
            )
        shape = (lanes * size,)
        self._image_bytes = image_bytes
        _check_bytes(spec, lanes, size, image_bytes, spill)
        try:
            self._observations = ObservationRows(spec, lanes, size, image_bytes, spill)
            self._actions = np.zeros((*shape, *spec.actions.shape), spec.actions.dtype)
            self._rewards = np.zeros(shape, np.float32)
            self._flags = np.zeros(shape, np.uint8)
        except MemoryError as error:
            raise ReplayError(f"cannot allocate a replay buffer of {spec.bound(capacity)} bytes") from error
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
        """Bytes of its columns in memory."""
        return self._observations.nbytes + self._actions.nbytes + self._rewards.nbytes + self._flags.nbytes

    @property
    def spilled(self) -> int:
        """Bytes of its columns in files."""
        return self._observations.spilled

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
        self.cut_off(lanes[~self._continues(lanes, steps.observations)])
        rows = self._occupy(lanes)
        self._observations[rows] = steps.observations
        self._actions[rows] = steps.actions
        self._rewards[rows] = steps.rewards
        ended = steps.terminations | steps.truncations
        self._flags[rows] = MOVES + TERMINATED * steps.terminations + ENDED * ended
        self._count += len(rows)
        self._advance(lanes)
        present = self._occupy(lanes)
        self._observations[present] = steps.next_observations
        self._open[lanes] = ~ended
        self._advance(lanes[ended])
        if self._tree is not None:
            self._tree.set(rows, np.full(len(rows), self._largest))
        self._forget()

    def _forget(self) -> None:
        """Forget the oldest rows until the images keep to their bytes."""
        while self._observations.image_bytes > (self._image_bytes or 0):
            self._first = np.maximum(self._first, self._advanced + 1 - self.rows_of_lane)
            lane = int(np.argmax(self._advanced - self._first))
            row = self._rows(np.array([lane]), self._first[[lane]] % self.rows_of_lane)
            self._clear(row)
            self._observations.drop_images(row)
            self._first[lane] += 1

    def cut_off(self, lanes: Rows) -> None:
        """Truncate the current episodes of some lanes: steps added next do not follow from them."""
        lanes = lanes[self._open[lanes]]
        before = self._rows(lanes, (self._head[lanes] - 1) % self.rows_of_lane)
        self._flags[before] |= ENDED
        self._open[lanes] = False
        self._advance(lanes)

    def _continues(self, lanes: Rows, observations: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return bool [n], whether observations continue the current episodes."""
        rows = self._rows(lanes, self._head[lanes])
        return self._open[lanes] & self._observations.equal(rows, observations)

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
        """Exclude rows from sampling."""
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
        sampled = np.empty(0, np.int64)
        # Rows without a step are drawn again: there is one for each episode.
        while len(sampled) < count:
            drawn = random.integers(ends[-1], size=count - len(sampled))
            lanes = np.searchsorted(ends, drawn, side="right")
            rows = self._rows(lanes, (drawn - ends[lanes] + held[lanes] + first[lanes]) % self.rows_of_lane)
            sampled = np.concatenate((sampled, rows[(self._flags[rows] & MOVES) > 0]))
        return sampled

    def gather(self, rows: Rows, weights: NDArray[np.float32], steps: int, discount: float) -> ReplayBatch:
        """Return transitions of up to `steps` steps.

        A transition is shorter where its episode ends, or where the environment has not come further yet. Its last
        observation counts, discounted by as many steps as there are, unless the task ended with the last of them.

        Args:
            rows: int64 [n], of `sample`.
            weights: float32 [n], likewise.
            steps: k, at least 1.
            discount: the discount of rewards, by step.
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
            self._observations[rows],
            self._actions[rows],
            rewards.astype(np.float32),
            discounts.astype(np.float32),
            self._observations[last],
            rows,
            weights,
        )

    def update_priorities(self, rows: Rows, errors: Array) -> None:
        """Set the priorities of sampled rows from their errors, float [n]; rows overwritten since then are skipped."""
        if self._tree is None or self._prioritized is None:
            return
        kept = (self._flags[rows] & MOVES) > 0
        priorities = (np.abs(errors[kept]).astype(np.float64) + _LEAST_ERROR) ** self._prioritized.alpha
        if len(priorities):
            self._largest = max(self._largest, float(priorities.max()))
            self._tree.set(rows[kept], priorities)

    def save(self, folder: Path | None = None) -> Arrays:
        """Return the state as arrays by name, without memory that was never written.

        Args:
            folder: what is in files is written there, for `spilled_in`; None: it is left out.

        Raises:
            ReplayError: there is no room in the folder.
        """
        size = int(self._used.max(initial=0))
        if folder is not None:
            self._observations.save_spilled(folder, size)
        return {**self._saved(size), **self._observations.compressed()}

    def _saved(self, size: int) -> Arrays:
        """Return the first `size` rows of each lane of plain-array columns, and the state that belongs to no row."""
        columns = self._columns()
        if self._tree is not None:
            columns["priorities"] = self._tree.priorities
        shape = (self.lanes, self.rows_of_lane)
        arrays = {name: column.reshape(*shape, *column.shape[1:])[:, :size].copy() for name, column in columns.items()}
        sizes = {"head": self._head.copy(), "used": self._used.copy(), "open": self._open.copy()}
        if self._observations.images:
            sizes |= {"advanced": self._advanced.copy(), "first": self._first.copy()}
        return {**arrays, **sizes, "largest": np.array(self._largest), "size": np.array(self.rows_of_lane)}

    def _columns(self) -> dict[str, Array]:
        """Return the columns that are plain arrays, by name."""
        return {**self._observations.plain(), _ACTIONS: self._actions, _REWARDS: self._rewards, _FLAGS: self._flags}

    def load(self, state: Mapping[str, Array]) -> None:
        """Restore the state of `save` and `spilled_in`; sampling continues as it would have.

        How much of it is in memory may be another amount now.

        Raises:
            ReplayError: it is of a buffer with other sizes, columns or sampling.
        """
        wanted = {**self._saved(0), **self._observations.without_rows()}
        compressed = {name for name in state if name.startswith(COMPRESSED)}
        fits = set(state) == set(wanted) | compressed and bool(compressed) == bool(self._observations.images)
        fits = fits and int(state["size"]) == self.rows_of_lane
        fits = fits and all(
            state[name].dtype == expected.dtype
            and len(np.atleast_1d(state[name])) == len(np.atleast_1d(expected))
            and state[name].shape[2:] == expected.shape[2:]
            for name, expected in wanted.items()
        )
        if not fits:
            raise ReplayError(
                "the saved replay buffer does not match this run",
                why="the environments, their number, the capacity or the sampling have changed",
                help="write the values of the original run; `config.yaml` in its folder records them",
            )
        for name, column in self._columns().items():
            whole = column.reshape(self.lanes, self.rows_of_lane, *column.shape[1:])
            saved = state[name]
            whole[:, : saved.shape[1]] = saved
            whole[:, saved.shape[1] :] = 0
        self._head, self._used = state["head"].copy(), state["used"].copy()
        self._open = state["open"].copy()
        if self._observations.images:
            self._advanced, self._first = state["advanced"].copy(), state["first"].copy()
        self._observations.load(state)
        self._count = int((self._flags & MOVES).sum())
        self._largest = float(state["largest"])
        if self._tree is not None:
            priorities = np.zeros((self.lanes, self.rows_of_lane))
            priorities[:, : state["priorities"].shape[1]] = state["priorities"]
            self._tree.set(np.arange(priorities.size), priorities.ravel())


def _check_bytes(spec: TransitionSpec, lanes: int, size: int, image_bytes: int | None, spill: Spill | None) -> None:
    """Refuse bounds that are too low for the least that has to be in memory."""
    images = sum(observation.nbytes for observation in spec.observations.values() if observation.is_image)
    least = SMALLEST_LANE * lanes * images
    if image_bytes is not None and image_bytes < least:
        raise ReplayError(
            f"{image_bytes} bytes are too few for the images of {lanes} environments",
            help=f"it needs at least {least}; raise `replay.image_memory_gib`",
        )
    least = spec.least_row_bytes * lanes * size
    if spill is not None and spill.memory_bytes < least:
        raise ReplayError(
            f"{spill.memory_bytes} bytes are too few for the actions and rewards of {lanes * size} rows",
            help=f"they need {least}; raise `replay.memory_gib`, or lower `replay.capacity`",
        )
