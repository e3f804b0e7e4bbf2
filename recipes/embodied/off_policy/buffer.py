"""A replay buffer: a ring of transitions for each environment, and n-step returns computed at sampling.

Each lane of the buffer is the history of one environment; each row holds an observation, an action and a reward:

    row      0    1    2    3    4    5    6
             o a  o a  o a  o    o a  o a  o
             moves          end  moves     newest

The observation after a step is in the next row, so that an image is stored once. The last step of an episode is
followed by a row with only the final observation, and the newest step by one with the current observation; neither is
ever sampled. The oldest rows are overwritten first, so that a transition never outlives the rows after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.off_policy.storage import (
    Arrays,
    ReplayBatch,
    ReplayError,
    Rows,
    Transitions,
    TransitionSpec,
    joined,
    made_column,
    save_column,
    saved_columns,
)
from recipes.training.arrays import Array

# Bits of a row's flags: a step starts here; the task ended with it; the episode ended with it.
MOVES, TERMINATED, ENDED = 1, 2, 4
# The fewest rows of a lane: a step, its final observation, and one of the next episode.
SMALLEST_LANE: Final = 4
_OBSERVED: Final = "observations/"
_ACTIONS, _REWARDS, _FLAGS = "actions", "rewards", "flags"


class ReplayBuffer:
    """The newest `capacity` rows of transitions of some environments.

    Args:
        spec: the columns.
        lanes: number of environments.
        capacity: the number of rows over all lanes, which share them equally. An episode takes one row more than its
            steps.
        storage: the folder for files of observations; None: they are in memory.

    Raises:
        ReplayError: there are fewer than 4 rows for each environment, or memory or disk space is insufficient.
    """

    def __init__(self, spec: TransitionSpec, lanes: int, capacity: int, storage: Path | None = None) -> None:
        self.spec, self.lanes = spec, lanes
        self.rows_of_lane = size = capacity // lanes
        if size < SMALLEST_LANE:
            raise ReplayError(
                f"a replay buffer of {capacity} rows is too small for {lanes} environments",
                help=f"it needs at least {SMALLEST_LANE * lanes}",
            )
        shape = (lanes * size,)
        try:
            self._observations = {
                name: made_column(lanes * size, column, storage) for name, column in spec.observations.items()
            }
            self._actions = np.zeros((*shape, *spec.actions.shape), spec.actions.dtype)
            self._rewards = np.zeros(shape, np.float32)
            self._flags = np.zeros(shape, np.uint8)
        except MemoryError as error:
            raise ReplayError(f"cannot allocate a replay buffer of {spec.row_bytes * capacity} bytes") from error
        # Per lane: the row for the next step, the number of rows ever written, and whether an episode is running, whose
        # current observation is in row `head`.
        self._head = np.zeros(lanes, np.int64)
        self._used = np.zeros(lanes, np.int64)
        self._open = np.zeros(lanes, np.bool_)
        self._count = 0
        self._in_files = storage is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the columns in memory."""
        return sum(column.nbytes for column in self._columns().values()) - self.stored

    @property
    def stored(self) -> int:
        """The bytes of the columns in files."""
        return sum(column.nbytes for column in self._observations.values()) if self._in_files else 0

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""
        return self._count

    @property
    def rows(self) -> Rows:
        """int64 [len(self)], all rows that can be sampled."""
        return np.flatnonzero(self._flags & MOVES)

    def add(self, steps: Transitions, lanes: Rows | None = None) -> None:
        """Add one step of some environments.

        If the observation before the step is not the one after the lane's last step, the earlier episode was left
        unfinished, and counts as truncated there.

        Args:
            steps: one step in each of n environments.
            lanes: int64 [n], distinct; None: all lanes in order.
        """
        lanes = np.arange(self.lanes) if lanes is None else lanes
        if not len(lanes):
            return
        self.cut_off(lanes[~self._continues(lanes, steps.observations)])
        rows = self._occupy(lanes)
        self._observe(rows, steps.observations)
        self._actions[rows] = steps.actions
        self._rewards[rows] = steps.rewards
        ended = steps.terminations | steps.truncations
        self._flags[rows] = MOVES + TERMINATED * steps.terminations + ENDED * ended
        self._count += len(rows)
        self._advance(lanes)
        present = self._occupy(lanes)
        self._observe(present, steps.next_observations)
        self._open[lanes] = ~ended
        self._advance(lanes[ended])

    def _observe(self, rows: Rows, observations: Mapping[str, Array]) -> None:
        for name, column in self._observations.items():
            column[rows] = observations[name]

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
        equal = self._open[lanes]
        for name, column in self._observations.items():
            equal &= (column[rows] == observations[name]).reshape(len(rows), -1).all(axis=1)
        return equal

    def _rows(self, lanes: Rows, slots: Rows) -> Rows:
        return lanes * self.rows_of_lane + slots

    def _advance(self, lanes: Rows) -> None:
        self._head[lanes] = (self._head[lanes] + 1) % self.rows_of_lane

    def _occupy(self, lanes: Rows) -> Rows:
        """Clear the next row of some lanes, which is about to be written, and return these rows."""
        rows = self._rows(lanes, self._head[lanes])
        self._clear(rows)
        self._used[lanes] = np.maximum(self._used[lanes], self._head[lanes] + 1)
        return rows

    def _clear(self, rows: Rows) -> None:
        self._count -= int((self._flags[rows] & MOVES).sum())
        self._flags[rows] = 0

    def sample(self, count: int, random: np.random.Generator) -> Rows:
        """Draw rows uniformly, with replacement.

        Args:
            count: n.
            random: the only source of randomness: equal states of generator and buffer give equal rows.

        Returns:
            int64 [n].

        Raises:
            ReplayError: there are no transitions.
        """
        if not self._count:
            raise ReplayError("nothing can be sampled from an empty replay buffer")
        held = self._used
        ends = np.cumsum(held)
        sampled = np.empty(0, np.int64)
        # Rows without a step, one per episode, are drawn again.
        while len(sampled) < count:
            drawn = random.integers(ends[-1], size=count - len(sampled))
            lanes = np.searchsorted(ends, drawn, side="right")
            rows = self._rows(lanes, drawn - ends[lanes] + held[lanes])
            sampled = np.concatenate((sampled, rows[(self._flags[rows] & MOVES) > 0]))
        return sampled

    def gather(self, rows: Rows, steps: int, discount: float) -> ReplayBatch:
        """Return transitions of up to `steps` steps.

        A transition is shorter if its episode ends, or if its lane has no further steps yet. Its last observation has a
        value, discounted by the number of steps, unless the task ended with the last step.

        Args:
            rows: int64 [n], of `sample`.
            steps: k, at least 1.
            discount: the discount of rewards per step.
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
        )

    def save(self, folder: Path) -> Arrays:
        """Write the observations that exist into a folder, and return the other state.

        Raises:
            ReplayError: the disk has no room.
        """
        size = int(self._used.max(initial=0))
        for name, column in self._columns().items():
            if name.startswith(_OBSERVED):
                save_column(folder / f"{name}.npy", self._by_lane(column)[:, :size])
        rows = {name: self._by_lane(column)[:, :size] for name, column in self._columns().items()}
        return {name: array for name, array in rows.items() if not name.startswith(_OBSERVED)} | self._sizes()

    def _sizes(self) -> Arrays:
        """Return the state that does not belong to rows."""
        return {"head": self._head, "used": self._used, "open": self._open, "size": np.array(self.rows_of_lane)}

    def _columns(self) -> dict[str, Array]:
        """Return the columns by their names in a saved state."""
        observed = {f"{_OBSERVED}{name}": column for name, column in self._observations.items()}
        return {**observed, _ACTIONS: self._actions, _REWARDS: self._rewards, _FLAGS: self._flags}

    def _by_lane(self, column: Array) -> Array:
        return column.reshape(self.lanes, self.rows_of_lane, *column.shape[1:])

    def load(self, state: Mapping[str, Array], folder: Path) -> None:
        """Restore the state that `save` returned and wrote into a folder; sampling continues unchanged.

        Earlier versions saved observations in `state`; observations may move between memory and files.

        Raises:
            ReplayError: the state is of a buffer with other sizes or columns, or a file is damaged.
        """
        state = {**saved_columns(folder, _OBSERVED), **state}
        columns = {name: self._by_lane(column) for name, column in self._columns().items()}
        fits = (columns.keys() | self._sizes().keys()) <= state.keys() and int(state["size"]) == self.rows_of_lane
        fits = fits and all(
            state[name].dtype == column.dtype
            and (len(state[name]), state[name].shape[2:]) == (self.lanes, column.shape[2:])
            for name, column in columns.items()
        )
        if not fits:
            raise ReplayError(
                "the saved replay buffer does not match this run",
                why="the environments, their number or the capacity have changed",
                help="write the values of the original run; `config.yaml` in its folder records them",
            )
        for name, column in columns.items():
            for lane, saved in zip(column, state[name], strict=True):
                lane[: len(saved)] = saved
        self._flags.reshape(self.lanes, -1)[:, state[_FLAGS].shape[1] :] = 0
        self._head, self._used = state["head"].copy(), state["used"].copy()
        self._open = state["open"].copy()
        self._count = int((self._flags & MOVES).sum())


class ReplayMixture:
    """Several sources of transitions, each with its share of every batch.

    Args:
        buffers: the buffers by the name of the source, as in `online`, `demonstrations`, `interventions`.
        shares: the share of each buffer, at least 0, not all 0; only proportions count.

    Raises:
        ReplayError: the names of shares and buffers differ, or a share is invalid.
    """

    def __init__(self, buffers: Mapping[str, ReplayBuffer], shares: Mapping[str, float]) -> None:
        wrong = set(buffers) != set(shares) or min(shares.values(), default=0) < 0 or not sum(shares.values())
        if wrong:
            raise ReplayError(f"the shares {dict(shares)} are not those of {', '.join(buffers)}")
        self.buffers, self.shares = dict(buffers), dict(shares)

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())

    def counts(self, total: int) -> dict[str, int]:
        """Return the number of transitions per source: its share of `total`, exact where that is an integer.

        Others are rounded by largest remainders. Other sources replace the share of an empty one.
        """
        shares = {name: share for name, share in self.shares.items() if share and len(self.buffers[name])}
        if not shares:
            # All sources with a share are empty, so that any other is used.
            shares = {name: 1.0 for name, buffer in self.buffers.items() if len(buffer)}
        if not shares:
            raise ReplayError("nothing can be sampled from empty replay buffers")
        whole = sum(shares.values())
        exact = {name: total * share / whole for name, share in shares.items()}
        counts = {name: int(count + 1e-9) for name, count in exact.items()}
        by_rest = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_rest[: total - sum(counts.values())]:
            counts[name] += 1
        return {name: counts.get(name, 0) for name in self.buffers}

    def sample(self, count: int, random: np.random.Generator, steps: int, discount: float) -> ReplayBatch:
        """Draw a batch; the rows of each source are together, in the order of the buffers. See `ReplayBuffer`."""
        parts: list[ReplayBatch] = []
        for name, number in self.counts(count).items():
            if number:
                parts.append(self.buffers[name].gather(self.buffers[name].sample(number, random), steps, discount))
        return joined(parts)
