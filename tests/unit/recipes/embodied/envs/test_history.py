"""Observations in a row: one for each step of the environment, from the start of its episode on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.episodes.collector import EpisodeCollector

Make = Callable[..., VectorEnv]


def past(observations: Any) -> list[list[int]]:
    return observations["past.states"][..., 0].astype(int).tolist()


def actions(env: VectorEnv, chunk: int) -> Any:
    return np.ones((env.num_envs, chunk, 1), np.float32)


def test_steps_within_a_chunk_are_part_of_the_history(counting: Make) -> None:
    env = counting(2, observed_steps=3)
    first = env.reset()
    assert past(first) == [[0, 0]] * 2
    after = env.step(actions(env, 4)).observations
    assert after["states"][:, 0].tolist() == [4, 4]
    assert past(after) == [[2, 3]] * 2
    assert past(env.step(actions(env, 1)).observations) == [[3, 4]] * 2
    assert past(first) == [[0, 0]] * 2


def test_an_episode_begins_without_the_one_before(counting: Make) -> None:
    env = counting(2, observed_steps=3, options={"end": [2, 0]})
    env.reset()
    result = env.step(actions(env, 3))
    assert result.final_observations is not None
    assert past(result.final_observations) == [[0, 1], [1, 2]]
    assert past(result.observations) == [[0, 0], [1, 2]]
    starts = result.observations["past.states"][0, :, 1]
    assert (starts == result.observations["states"][0, 1]).all()


def test_a_resumed_run_has_the_same_history(counting: Make) -> None:
    env, again = (counting(2, observed_steps=4) for _ in range(2))
    env.reset()
    env.step(actions(env, 3))
    state = env.save()
    assert state is not None
    assert again.load(state)
    assert np.array_equal(again.observe()["past.states"], env.observe()["past.states"])
    one, other = (run.step(actions(run, 2)).observations for run in (env, again))
    assert np.array_equal(one["past.states"], other["past.states"])


def test_recordings_keep_each_observation_once(counting: Make) -> None:
    env = counting(1, observed_steps=2, max_episode_steps=3, auto_reset=False)
    collector = EpisodeCollector(env, 0, "count", "everything")
    assert past(collector.step(actions(env, 2))) == [[1]]
    collector.step(actions(env, 2))
    (episode,) = collector.episodes()
    assert "past.states" not in episode.columns
    assert episode.columns["states"][:, 0].tolist() == [0, 1, 2]
