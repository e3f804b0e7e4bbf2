"""Whole episodes, step by step, and what a recording keeps of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.envs.registry import make_env
from recipes.embodied.episodes.collector import CollectedEpisode, EpisodeCollector, Keep
from recipes.embodied.interventions.intervention import InterventionSource, Takeover
from recipes.embodied.using.recording import features_of, to_columns


def collect(keep: Keep, chunk: int = 1, **settings: Any) -> list[CollectedEpisode]:
    env = make_env("franka_kin", EnvSettings(num_envs=3, task="reach", auto_reset=False, seed=3, **settings))
    collector = EpisodeCollector(env, 5, "reach", keep)
    while not collector.over:
        actions = env.expert()
        assert actions is not None
        collector.step(np.repeat(actions[:, None], chunk, axis=1))
    return collector.episodes()


def test_an_expert_solves_every_episode() -> None:
    episodes = collect("everything")
    assert [episode.env for episode in episodes] == [0, 1, 2]
    assert all(episode.success_once and episode.success_at_end and episode.reset == 5 for episode in episodes)
    assert all(episode.outcome == "success" for episode in episodes)
    assert len({episode.start["seed"] for episode in episodes}) == 3
    for item in episodes:
        assert {name: len(rows) for name, rows in item.columns.items()} == dict.fromkeys(
            ("states", "actions", "rewards", "successes", "terminations"), item.length
        )
        assert item.columns["successes"].tolist() == [False] * (item.length - 1) + [True]
        assert item.total_reward == pytest.approx(item.columns["rewards"].sum(), rel=1e-5)
        assert np.abs(item.columns["actions"]).max() <= 1


def test_observations_come_before_their_actions() -> None:
    env = make_env("franka_kin", EnvSettings(num_envs=3, task="reach", auto_reset=False, seed=3))
    first = env.reset(5)["states"]
    for row, item in enumerate(collect("everything")):
        assert np.array_equal(item.columns["states"][0], first[row])


def test_chunks_end_with_their_episode() -> None:
    lengths = [item.length for item in collect("nothing", max_episode_steps=5, ignore_terminations=True)]
    assert lengths == [5, 5, 5]
    assert [item.length for item in collect("nothing", 3, max_episode_steps=5, ignore_terminations=True)] == lengths
    assert collect("nothing")[0].columns == {}


def test_environments_that_begin_anew_are_refused() -> None:
    env = make_env("franka_kin", EnvSettings(num_envs=1, task="reach"))
    with pytest.raises(ValueError, match="without auto_reset"):
        EpisodeCollector(env, 0, "reach", "nothing")


def test_columns_have_the_names_of_lerobot() -> None:
    (episode, *_) = collect("everything")
    spec = EnvSpec(state_size=episode.columns["states"].shape[1], action_size=7)
    columns, features = to_columns(episode, spec), features_of(spec)
    assert set(columns) == set(features)
    assert columns["next.done"].tolist() == [False] * (episode.length - 1) + [True]
    assert not columns["next.truncated"].any()
    seen = {"images.main": np.zeros((1, 4, 4, 3), np.uint8), "terminations": np.array([False])}
    pictured = CollectedEpisode(0, 0, "", 1, 0.0, None, None, columns=seen)
    assert set(to_columns(pictured, EnvSpec(0, 1))) == {"observation.images.main", "next.done", "next.truncated"}
    cameras = features_of(EnvSpec(0, 1, num_choices=3, cameras={"main": (4, 4, 3)}), video=True)
    assert cameras["observation.images.main"] == Feature("video", (4, 4, 3), ["height", "width", "channels"])
    assert cameras["action"] == Feature("int64", (1,))


def test_an_episode_that_is_cut_off_is_recorded_so() -> None:
    (episode, *_) = collect("everything", max_episode_steps=3, ignore_terminations=True)
    columns = to_columns(episode, EnvSpec(state_size=episode.columns["states"].shape[1], action_size=7))
    assert columns["next.done"].tolist() == columns["next.truncated"].tolist() == [False, False, True]


class SecondOfFive(InterventionSource):
    """Moves the first environment in every fifth step, from the second one on."""

    def read(self) -> Takeover | None:
        if int(self.env.progress.steps[0]) % 5 != 1:
            return None
        rows = np.arange(self.env.num_envs) == 0
        return Takeover(rows, np.full((self.env.num_envs, self.env.action_size), 0.5, np.float32), {})


def test_the_rest_of_a_chunk_that_somebody_interrupts_is_dropped() -> None:
    settings = EnvSettings(num_envs=2, task="reach", auto_reset=False, max_episode_steps=10, ignore_terminations=True)
    env = make_env("franka_kin", settings)
    env.intervention = SecondOfFive(env, None)
    collector = EpisodeCollector(env, 0, "reach", "everything")
    while not collector.over:
        collector.step(np.full((2, 5, env.action_size), 0.1, np.float32))
    helped, alone = collector.episodes()
    # The policy's first action, the person's, and nothing until the policy has seen what became of it.
    assert helped.columns["actions"][:, 0].tolist() == pytest.approx([0.1, 0.5, 0, 0, 0] * 2)
    assert helped.columns["interventions"].tolist() == [False, True, False, False, False] * 2
    assert alone.columns["actions"][:, 0].tolist() == pytest.approx([0.1] * 10)
    assert not alone.columns["interventions"].any()
