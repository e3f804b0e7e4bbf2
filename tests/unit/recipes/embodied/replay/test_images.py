"""Compressed images of a replay buffer: nothing is lost, and the memory is bounded by what was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.replay.buffer import Prioritization, ReplayBuffer
from recipes.embodied.replay.images import compressed, decompressed
from recipes.embodied.replay.replay_types import ReplayError, Transitions, TransitionSpec

SHAPE = (8, 8, 3)
SPEC = TransitionSpec.of({"states": ((1,), "float32"), "images.main": (SHAPE, "uint8")}, (1, "float32"))
IMAGE = 8 * 8 * 3


@given(arrays(np.uint8, st.tuples(*[st.integers(1, 9)] * 2, st.just(3))))
def test_nothing_is_lost(image: Any) -> None:
    assert np.array_equal(decompressed(compressed(image), image.shape), image)


def test_pictures_of_an_arm_take_less_than_half() -> None:
    env = make_env("franka_vision", EnvSettings(num_envs=8))
    images = env.reset(0)["images.main"]
    assert sum(len(compressed(image)) for image in images) < images.nbytes / 2


def observed(number: int) -> dict[str, Any]:
    """Return an observation whose image is noise of its own, which cannot be compressed."""
    image = np.random.default_rng(number).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
    return {"states": np.full((1, 1), number, np.float32), "images.main": image}


def add(buffer: ReplayBuffer, numbers: range, lane: int = 0, every: int = 7) -> None:
    """Add steps from each number to the next; an episode ends with each number that `every` divides."""
    for number in numbers:
        flag = np.array([number % every == 0])
        one = np.ones((1, 1), np.float32)
        step = Transitions(observed(number), one * number, one[0] * number, flag, ~flag & False, observed(number + 1))
        buffer.add(step, np.array([lane]))


def check(buffer: ReplayBuffer) -> list[int]:
    """Compare the images of all transitions with the truth; return the numbers of their first states."""
    rows = buffer.rows
    result = buffer.gather(rows, np.ones(len(rows), np.float32), 1, 0.9)
    numbers = result.observations["states"][:, 0].astype(int).tolist()
    for index, number in enumerate(numbers):
        assert np.array_equal(result.observations["images.main"][index], observed(number)["images.main"][0])
        after = int(result.next_observations["states"][index, 0])
        assert after == number + 1
        assert np.array_equal(result.next_observations["images.main"][index], observed(after)["images.main"][0])
    return sorted(numbers)


@pytest.mark.parametrize("prioritized", [None, Prioritization()])
def test_with_room_for_all_it_is_the_same_buffer(prioritized: Prioritization | None) -> None:
    plain, small = (ReplayBuffer(SPEC, 2, 40, prioritized, image_bytes) for image_bytes in (None, 10**6))
    for buffer in (plain, small):
        add(buffer, range(100, 150))
        add(buffer, range(300, 320), lane=1)
    assert check(plain) == check(small)
    for seed in range(5):
        ours, theirs = (item.sample(64, np.random.default_rng(seed)) for item in (small, plain))
        assert np.array_equal(ours[0], theirs[0])
    assert small.nbytes < SPEC.bound(40, 10**6) + 40 * 32


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(9, 30))
def test_the_oldest_rows_go_when_the_memory_is_used_up(first: int, second: int, images: int) -> None:
    budget = images * IMAGE
    buffer = ReplayBuffer(SPEC, 2, 200, None, budget)
    add(buffer, range(1, 1 + first))
    add(buffer, range(1001, 1001 + second), lane=1)
    assert buffer.nbytes <= SPEC.bound(200, budget)
    kept = check(buffer)
    ours, theirs = [item for item in kept if item < 1000], [item for item in kept if item > 1000]
    assert ours == list(range(1 + first - len(ours), 1 + first))
    assert theirs == list(range(1001 + second - len(theirs), 1001 + second))
    assert len(buffer) == len(kept)
    if kept:
        rows, _ = buffer.sample(200, np.random.default_rng(0))
        assert set(rows.tolist()) <= set(buffer.rows.tolist())


def test_a_saved_buffer_goes_on_as_the_one_it_was_saved_from() -> None:
    first, other = (ReplayBuffer(SPEC, 1, 100, None, 20 * IMAGE) for _ in range(2))
    add(first, range(1, 70))
    other.load({name: value.copy() for name, value in first.save().items()})
    for buffer in (first, other):
        add(buffer, range(70, 90))
    assert check(first) == check(other)
    drawn = [item.sample(50, np.random.default_rng(3))[0] for item in (first, other)]
    assert np.array_equal(drawn[0], drawn[1])


def test_memory_for_too_few_images_is_refused() -> None:
    with pytest.raises(ReplayError, match="too few for the images of 2 environments"):
        ReplayBuffer(SPEC, 2, 200, None, 8 * IMAGE - 1)
