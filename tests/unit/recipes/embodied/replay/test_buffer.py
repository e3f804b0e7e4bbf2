"""The replay buffer against a slow reference, which keeps whole episodes in lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.replay.buffer import Prioritization, ReplayBuffer
from recipes.embodied.replay.replay_types import ReplayBatch, ReplayError, Transitions, TransitionSpec

SPEC = TransitionSpec.of(EnvSpec(1, 1, cameras={"main": (2, 2, 3)}, has_instructions=True).observations, (1, "float32"))
GOES_ON, TERMINATES, CUT_OFF, BREAKS_OFF = range(4)


def observations(numbers: list[int]) -> dict[str, Any]:
    images = np.array(numbers, np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8)
    return {"states": np.array(numbers, np.float32)[:, None], "images.main": images}


class History:
    """A buffer, and beside it everything that was ever added: by lane episodes of (observation, reward, next, end)."""

    def __init__(self, lanes: int, capacity: int, prioritized: Prioritization | None = None) -> None:
        self.buffer = ReplayBuffer(SPEC, lanes, capacity, prioritized)
        self.steps: list[list[list[tuple[int, float, int, int]]]] = [[[]] for _ in range(lanes)]
        self.present = [100 * lane for lane in range(lanes)]
        self._number = 0

    def add(self, lane: int, outcome: int) -> None:
        self._number += 1
        here, following = self.present[lane], (self.present[lane] + 1) % 250
        reward = float(self._number % 7)
        self.buffer.add(
            Transitions(
                observations([here]),
                np.full((1, 1), reward, np.float32),
                np.array([reward], np.float32),
                np.array([outcome == TERMINATES]),
                np.array([outcome == CUT_OFF]),
                observations([following]),
            ),
            np.array([lane]),
        )
        self.steps[lane][-1].append((here, reward, following, outcome))
        # After any end, told or not, the next episode begins somewhere else.
        self.present[lane] = following if outcome == GOES_ON else (following + 10) % 250
        if outcome != GOES_ON:
            self.steps[lane].append([])

    def expected(self, episode: list[tuple[int, float, int, int]], at: int, steps: int, discount: float) -> Any:
        """Return observation, return, discount and next observation of a step, one step at a time."""
        total, factor = 0.0, 1.0
        last = at
        for step in range(at, min(at + steps, len(episode))):
            total += factor * episode[step][1]
            factor *= 0.0 if episode[step][3] == TERMINATES else discount
            last = step
        return episode[at][0], total, factor, episode[last][2]

    def kept(self) -> list[tuple[list[tuple[int, float, int, int]], int]]:
        """Return the steps that must still be there, by their rows: a lane has room for that many rows."""
        result: list[tuple[list[tuple[int, float, int, int]], int]] = []
        for episodes in self.steps:
            rows: list[tuple[list[tuple[int, float, int, int]], int] | None] = []
            for episode in episodes:
                if episode:
                    rows += [*((episode, at) for at in range(len(episode))), None]
            result += [row for row in rows[-self.buffer.rows_of_lane :] if row is not None]
        return result


def everything(buffer: ReplayBuffer, steps: int, discount: float) -> ReplayBatch:
    rows = buffer.rows
    return buffer.gather(rows, np.ones(len(rows), np.float32), steps, discount)


moves = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([GOES_ON] * 4 + [1, 2, 3])), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(moves, st.integers(4, 12), st.integers(1, 5))
def test_transitions_of_several_steps_are_those_of_the_reference(
    added: list[tuple[int, int]], rows_of_lane: int, steps: int
) -> None:
    history = History(2, 2 * rows_of_lane)
    for lane, outcome in added:
        history.add(lane, outcome)
    contents = everything(history.buffer, steps, 0.5)
    wanted = sorted(history.expected(episode, at, steps, 0.5) for episode, at in history.kept())
    images = contents.observations["images.main"]
    assert (images == images[:, :1, :1, :1]).all()
    states, following = contents.observations["states"][:, 0], contents.next_observations["states"][:, 0]
    assert (images[:, 0, 0, 0] == states).all()
    assert (contents.next_observations["images.main"][:, 1, 1, 2] == following).all()
    got = sorted(zip(states, contents.rewards, contents.discounts, following, strict=True))
    assert len(history.buffer) == len(wanted)
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-6)


def test_truncated_episode_has_a_next_value_terminated_has_none() -> None:
    for outcome, discount in ((TERMINATES, 0.0), (CUT_OFF, 0.25), (BREAKS_OFF, 0.25)):
        history = History(1, 8)
        history.add(0, GOES_ON)
        history.add(0, outcome)
        history.add(0, GOES_ON)
        contents = everything(history.buffer, 2, 0.5)
        assert contents.discounts[0] == discount
        # The last observation of its own episode, not the first of the next one.
        assert contents.next_observations["states"][0, 0] == 2


@settings(max_examples=30, deadline=None)
@given(moves, st.integers(0, 2**32 - 1), st.booleans())
def test_restored_buffer_samples_like_the_saved_one(added: list[tuple[int, int]], seed: int, prioritized: bool) -> None:
    how = Prioritization() if prioritized else None
    history = History(2, 24, how)
    for lane, outcome in added:
        history.add(lane, outcome)
    rows, _ = history.buffer.sample(8, np.random.default_rng(seed))
    history.buffer.update_priorities(rows, np.arange(8.0))
    other = ReplayBuffer(SPEC, 2, 24, how)
    other.load({name: value.copy() for name, value in history.buffer.save().items()})
    for _ in range(3):
        one, two = (item.sample(16, np.random.default_rng(seed)) for item in (history.buffer, other))
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])
        first, second = (item.gather(*one, 3, 0.9) for item in (history.buffer, other))
        for name in ("actions", "rewards", "discounts"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        for name in first.observations:
            np.testing.assert_array_equal(first.next_observations[name], second.next_observations[name])
        flags = np.zeros(2, np.bool_)
        step = Transitions(observations([1, 2]), np.ones((2, 1)), np.ones(2), flags, flags, observations([3, 4]))
        history.buffer.add(step)
        other.add(step)


def test_every_transition_is_drawn_as_often_as_any_other() -> None:
    history = History(2, 40)
    for number in range(37):
        history.add(number % 3 % 2, TERMINATES if number % 5 == 4 else GOES_ON)
    drawn = 40_000
    rows, weights = history.buffer.sample(drawn, np.random.default_rng(0))
    result = np.unique(rows, return_counts=True)[1]
    assert len(result) == len(history.buffer)
    expected = drawn / len(result)
    # Chi-square with as many degrees of freedom: mean k, deviation sqrt(2 k); seeded, so that it is always the same.
    statistic = ((result - expected) ** 2 / expected).sum()
    assert statistic < len(result) + 5 * np.sqrt(2 * len(result))
    assert (weights == 1).all()


def test_priorities_decide_how_often_a_transition_is_drawn() -> None:
    history = History(1, 20, Prioritization(alpha=0.5, beta=1.0))
    for _ in range(8):
        history.add(0, GOES_ON)
    errors = np.arange(8.0) ** 2 + 1
    history.buffer.update_priorities(np.arange(8), errors)
    drawn = 40_000
    rows, weights = history.buffer.sample(drawn, np.random.default_rng(0))
    probabilities = np.sqrt(errors) / np.sqrt(errors).sum()
    np.testing.assert_allclose(np.bincount(rows) / drawn, probabilities, atol=2e-3)
    # Weights undo the bias: what is drawn twice as often counts half as much.
    item = np.array([weights[rows == row][0] for row in range(8)])
    np.testing.assert_allclose(item, probabilities.min() / probabilities, rtol=1e-3)


def test_new_transitions_are_drawn_first_overwritten_ones_never() -> None:
    history = History(1, 8, Prioritization(alpha=1.0))
    for _ in range(30):
        history.add(0, GOES_ON)
        rows, _ = history.buffer.sample(64, np.random.default_rng(1))
        assert np.isin(rows, history.buffer.rows).all()
        history.buffer.update_priorities(rows, np.full(64, 1e-3))
    assert len(history.buffer) == 7


def test_memory_is_known_beforehand() -> None:
    buffer = ReplayBuffer(SPEC, 4, 1000)
    assert SPEC.row_bytes == 4 + 12 + 4 + 5
    assert buffer.nbytes == SPEC.bound(1000) == 25_000


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ReplayError, match="too small for 4 environments"):
        ReplayBuffer(SPEC, 4, 12)
    with pytest.raises(ReplayError, match="empty"):
        ReplayBuffer(SPEC, 1, 12).sample(1, np.random.default_rng())
    with pytest.raises(ReplayError, match="does not match this run"):
        ReplayBuffer(SPEC, 1, 12).load(ReplayBuffer(SPEC, 1, 16).save())
