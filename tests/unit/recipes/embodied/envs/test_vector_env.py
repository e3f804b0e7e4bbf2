"""When episodes end, how they start again, and what is told of them, for every environment alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.config.env_config import RecordedEnvironmentConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, StepResult
from recipes.embodied.envs.env_state import pack, unpack
from recipes.training.arrays import NonFiniteError

Make = Callable[..., VectorEnv]


def act(env: VectorEnv, reward: float = 1.0, chunk: int = 1) -> StepResult:
    return env.step(np.full((env.num_envs, chunk, 1), reward, np.float32))


def test_an_episode_is_cut_off_at_its_limit(counting: Make) -> None:
    env = counting(2, max_episode_steps=3)
    env.reset()
    results = [act(env, reward) for reward in (1.0, 2.0, 4.0, 8.0)]
    assert [result.truncations.any() for result in results] == [False, False, True, False]
    assert not any(result.terminations.any() for result in results)
    end = results[2]
    assert end.final_observations is not None
    assert end.final_observations["states"][:, 0].tolist() == [3, 3]
    assert end.observations["states"][:, 0].tolist() == [0, 0]
    assert end.episodes is not None
    assert end.episodes.returns.tolist() == [7, 7]
    assert end.episodes.lengths.tolist() == [3, 3]
    assert end.episodes.number.tolist() == [0, 0]
    assert results[3].observations["states"][:, 0].tolist() == [1, 1]
    assert results[3].episodes is None
    assert all(result.valid.all() for result in results)


def test_a_task_that_ends_starts_again_alone(counting: Make) -> None:
    env = counting(3, options={"end": [2, 0, 2]})
    first = env.reset()["states"].copy()
    act(env)
    result = act(env)
    assert result.terminations[:, 0].tolist() == [True, False, True]
    assert not result.truncations.any()
    assert result.dones[:, 0].tolist() == [True, False, True]
    assert result.episodes is not None
    assert result.episodes.env.tolist() == [0, 2]
    assert result.observations["states"][:, 0].tolist() == [0, 2, 0]
    assert result.final_observations is not None
    assert result.final_observations["states"][:, 0].tolist() == [2, 2, 2]
    after = result.observations["states"][:, 1]
    assert after[1] == first[1, 1]
    assert after[0] != first[0, 1]


def test_an_end_and_a_limit_at_once_are_both_told(counting: Make) -> None:
    env = counting(1, options={"end": [1]}, max_episode_steps=1)
    env.reset()
    result = act(env)
    assert result.terminations.all()
    assert result.truncations.all()


def test_terminations_can_be_ignored(counting: Make) -> None:
    env = counting(1, options={"end": [1], "solved": 1}, max_episode_steps=2, ignore_terminations=True)
    env.reset()
    assert not act(env).dones.any()
    end = act(env)
    assert not end.terminations.any()
    assert end.truncations.all()
    assert end.episodes is not None
    assert end.episodes.success_once is not None
    assert end.episodes.success_at_end is not None
    assert end.episodes.success_once.tolist() == [True]
    assert end.episodes.success_at_end.tolist() == [False]


@pytest.mark.parametrize("chunk", [1, 4])
def test_only_the_first_success_is_rewarded(counting: Make, chunk: int) -> None:
    settings = {"reward_coef": 5.0, "success_reward": True, "mask_after_success": True, "ignore_terminations": True}
    env = counting(2, options={"solved": 2}, max_episode_steps=4, **settings)
    env.reset()
    results = [act(env, 9.0, chunk) for _ in range(4 // chunk)]
    rewards, valid = (
        np.concatenate([getattr(result, name) for result in results], axis=1) for name in ("rewards", "valid")
    )
    assert rewards.tolist() == [[0, 5, 0, 0]] * 2
    assert valid.tolist() == [[True, True, False, False]] * 2
    ended = results[-1].episodes
    assert ended is not None
    assert ended.lengths.tolist() == [4, 4]
    assert ended.success_once is not None
    assert ended.success_once.all()
    # The next episode counts again.
    assert act(env).valid.all()


def test_rewards_are_scaled(counting: Make) -> None:
    env = counting(2, reward_coef=0.5)
    env.reset()
    assert act(env, 3.0).rewards.tolist() == [[1.5], [1.5]]


def test_without_auto_reset_an_environment_rests(counting: Make) -> None:
    env = counting(2, options={"end": [1, 0]}, max_episode_steps=3, auto_reset=False)
    env.reset()
    results = [act(env) for _ in range(4)]
    assert [result.valid[:, 0].tolist() for result in results] == [[True, True]] + 2 * [[False, True]] + [[False] * 2]
    assert [result.rewards[0, 0] for result in results] == [1, 0, 0, 0]
    assert [result.dones[:, 0].tolist() for result in results] == [
        [True, False],
        [False, False],
        [False, True],
        [False, False],
    ]
    assert results[3].observations["states"][:, 0].tolist() == [1, 3]
    assert [None if r.episodes is None else r.episodes.env.tolist() for r in results] == [[0], None, [1], None]
    assert env.reset()["states"][:, 0].tolist() == [0, 0]
    assert act(env).valid.all()


def test_the_rest_of_a_chunk_is_dropped_when_an_episode_ends(counting: Make) -> None:
    env = counting(2, options={"end": [2, 0]}, max_episode_steps=7)
    env.reset()
    result = act(env, chunk=4)
    assert result.valid.tolist() == [[True, True, False, False], [True] * 4]
    assert result.rewards.tolist() == [[1, 1, 0, 0], [1] * 4]
    assert result.terminations.tolist() == [[False, True, False, False], [False] * 4]
    assert result.observations["states"][:, 0].tolist() == [0, 4]
    assert result.episodes is not None
    assert result.episodes.lengths.tolist() == [2]


@given(st.integers(0, 1000), st.lists(st.integers(1, 6), min_size=4, max_size=4), st.booleans(), st.integers(1, 9))
def test_returns_and_lengths_are_those_of_what_was_carried_out(
    counting: Make, seed: int, ends: list[int], auto_reset: bool, limit: int
) -> None:
    """The same actions in chunks: episodes add up to exactly the valid rewards."""
    random = np.random.default_rng(seed)
    env = counting(4, options={"end": ends}, auto_reset=auto_reset, max_episode_steps=limit)
    env.reset()
    running, length = np.zeros(4), np.zeros(4, np.int64)
    for _ in range(10):
        result = env.step(random.integers(0, 9, size=(4, 3, 1)).astype(np.float32))
        running += result.rewards.sum(axis=1)
        length += result.valid.sum(axis=1)
        assert not result.rewards[~result.valid].any()
        assert not result.dones[~result.valid].any()
        assert (result.dones.sum(axis=1) <= 1).all()
        if result.episodes is None:
            assert not result.dones.any()
            continue
        rows = result.episodes.env
        assert rows.tolist() == np.flatnonzero(result.dones.any(axis=1)).tolist()
        assert result.episodes.returns.tolist() == running[rows].tolist()
        assert result.episodes.lengths.tolist() == length[rows].tolist()
        assert (length[rows] == np.minimum(np.array(ends), limit)[rows]).all()
        running[rows], length[rows] = 0, 0


def test_groups_begin_equal_in_every_episode(counting: Make) -> None:
    env = counting(6, group_size=3, max_episode_steps=1)
    draws = [env.reset()["states"][:, 1], act(env).observations["states"][:, 1], env.reset()["states"][:, 1]]
    for draw in draws:
        assert len(set(draw[:3])) == len(set(draw[3:])) == 1
        assert draw[0] != draw[3]
    assert len({draw[0] for draw in draws}) == 3


def test_starts_do_not_depend_on_how_environments_are_dealt(counting: Make) -> None:
    whole = counting(4, seed=5).reset()["states"]
    shares = [counting(2, seed=5, first_env=first).reset()["states"] for first in (0, 2)]
    assert np.array_equal(whole, np.concatenate(shares))


def test_the_number_of_a_reset_tells_its_starts(counting: Make) -> None:
    env, later = counting(seed=1), counting(seed=1)
    starts = [env.reset()["states"][:, 1].tolist() for _ in range(3)]
    assert later.reset(2)["states"][:, 1].tolist() == starts[2]
    assert later.reset(0)["states"][:, 1].tolist() == starts[0]
    assert later.reset()["states"][:, 1].tolist() == starts[1]
    assert counting(seed=2).reset()["states"][:, 1].tolist() != starts[0]


def test_observations_stay_what_they_were(counting: Make) -> None:
    env = counting(1)
    first = env.reset()
    act(env)
    assert first["states"][0, 0] == 0


def test_the_limit_of_the_environment_holds_where_none_is_given(counting: Make) -> None:
    assert counting(1).max_episode_steps == 50
    assert counting(1, max_episode_steps=7).max_episode_steps == 7


@pytest.mark.parametrize(("breaks", "tensor"), [("reward", "reward"), ("observation", "observation states")])
def test_what_is_not_finite_is_told_at_once(counting: Make, breaks: str, tensor: str) -> None:
    env = counting(3, first_env=6, options={"broken": [0, 2, 2], "breaks": breaks})
    env.reset()
    act(env)
    with pytest.raises(NonFiniteError, match=f"`{tensor}` is nan, not a finite number") as caught:
        act(env)
    steps = 1 if breaks == "reward" else 2
    assert caught.value.where == f"environment 7, after {steps} steps of its episode 1"
    assert "division by zero" in str(caught.value.help)
    assert "a number beyond 3.4e38" in str(caught.value.help)


def test_nonfinite_action_is_reported_before_it_runs(counting: Make) -> None:
    env = counting(2, on_nonfinite="skip")
    env.reset()
    with pytest.raises(NonFiniteError, match="`action` is inf") as caught:
        env.step(np.array([[[0.0]], [[np.inf]]], np.float32))
    assert "the policy" in str(caught.value.help)
    assert env.observe()["states"][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("breaks", ["reward", "observation"])
def test_a_step_that_is_not_finite_can_be_left_out(counting: Make, breaks: str) -> None:
    env = counting(2, options={"broken": [0, 2], "breaks": breaks}, on_nonfinite="skip")
    env.reset()
    result = act(env, chunk=2)
    assert result.valid.tolist() == [[True, True], [True, False]]
    assert result.truncations.tolist() == [[False, False], [False, True]]
    assert np.isfinite(result.rewards).all()
    assert result.final_observations is not None
    assert np.isfinite(result.final_observations["states"]).all()
    assert result.episodes is not None
    assert result.episodes.env.tolist() == [1]
    # It goes on with a new episode.
    assert result.observations["states"][:, 0].tolist() == [2, 0]
    assert act(env).valid.all()


def test_a_state_continues_elsewhere_in_other_batches(counting: Make) -> None:
    """Two batches of two, one of which is at its second reset's third episode, go on as one batch of four."""
    options = {"max_episode_steps": 3, "seed": 4, "group_size": 2}
    halves = [counting(2, first_env=first, **options) for first in (0, 2)]
    for half in halves:
        half.reset(1)
        for reward in range(7):
            act(half, reward)
    states = [half.save() for half in halves]
    packs = [pack([state], "setup") for state in states if state is not None]
    whole = counting(4, **options)
    unpacked = unpack(reversed(packs), "setup", whole.numbers)
    assert unpacked is not None
    assert whole.load(unpacked)
    assert whole.started
    for reward in (3, 1, 4, 1, 5):
        expected = [act(half, reward) for half in halves]
        result = act(whole, reward)
        assert np.array_equal(
            result.observations["states"], np.concatenate([item.observations["states"] for item in expected])
        )
        assert (result.episodes is None) == (expected[0].episodes is None)
        if result.episodes is not None:
            returns = [item.episodes.returns for item in expected if item.episodes is not None]
            assert np.array_equal(result.episodes.returns, np.concatenate(returns))


def test_settings_are_those_of_the_section() -> None:
    config = RecordedEnvironmentConfig.model_validate(
        {"task": "reach", "max_episode_steps": 7, "auto_reset": False, "ignore_terminations": True, "seed": 3}
    )
    settings = EnvSettings.of(config, num_envs=8, first_env=16, group_size=4)
    assert settings == EnvSettings(
        num_envs=8,
        first_env=16,
        total_envs=64,
        task="reach",
        max_episode_steps=7,
        auto_reset=False,
        ignore_terminations=True,
        group_size=4,
        seed=3,
        options={},
        repeats=True,
    )


def test_an_interface_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        VectorEnv(EnvSettings(num_envs=1))  # type: ignore[abstract]
