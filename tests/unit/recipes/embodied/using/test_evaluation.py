"""Episodes of evaluations and recordings: how they are collected, filmed and counted, and which starts are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.demonstrations import load_demonstrations
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.pictures import read_video
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EnvironmentConfig, EvalEnvironmentConfig
from recipes.embodied.envs.checks import EnvContractError
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.intervention import InterventionSource, Takeover
from recipes.embodied.loop.videos import (
    EPISODES,
    MOST_KINDS,
    EpisodeFrames,
    FrameRecorder,
    pick_per_outcome,
    tiled,
    write_videos,
)
from recipes.embodied.using import recording
from recipes.embodied.using.collector import CollectedEpisode, EpisodeCollector, Keep
from recipes.embodied.using.evaluation import _collect, digest, figures, locate_weights, shared_starts, summary
from recipes.embodied.using.recording import features_of, to_columns
from rlinf_core import ConfigError
from rlinf_core.runners.metrics import wilson_interval
from tests.known import known
from tests.unit.recipes.embodied.conftest import CountingEnv


def episode(env: int, task: str, once: bool | None, at_end: bool | None) -> CollectedEpisode:
    return CollectedEpisode(env, 0, task, 10 * (env + 1), float(env), once, at_end)


def test_figures_are_by_task_and_in_all() -> None:
    episodes = [episode(0, "a", True, True), episode(1, "a", True, False), episode(2, "b", False, False)]
    result = summary(episodes)
    assert result["total"]["success_at_end"] == pytest.approx(1 / 3)
    assert result["total"]["success_once"] == pytest.approx(2 / 3)
    assert result["total"]["success_at_end_interval"] == list(wilson_interval(1, 3))
    assert (result["total"]["return"], result["total"]["episode_len"]) == (1.0, 20.0)
    assert {task: item["success_at_end"] for task, item in result["tasks"].items()} == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize(("lost", "left_out"), [((), 0), (((2, 0),), 1), (((3, 1),), 0), (((0, 0), (1, 1)), 2)])
def test_nothing_takes_the_place_of_an_episode_left_out(lost: tuple[tuple[int, int], ...], left_out: int) -> None:
    def batches(*_: Any, **__: Any) -> Iterator[list[CollectedEpisode]]:
        for reset in itertools.count():
            every = [CollectedEpisode(env, reset, "pick", 5, 1.0, True, True) for env in range(4)]
            yield [episode for episode in every if (episode.env, episode.reset) not in lost]

    lines: list[str] = []
    collection: Any = SimpleNamespace(num_envs=4, episodes=batches)
    collected, _ = _collect(collection, 6, EvalEnvironmentConfig(), False, lines.append, required=False)
    # The four environments of the first reset, and two of the second.
    assert len(collected) == 6 - left_out
    assert {(episode.env, episode.reset) for episode in collected} <= {*((n, 0) for n in range(4)), (0, 1), (1, 1)}
    assert lines[-1].startswith("6 of 6 episodes")
    assert (f"{left_out} left out" in lines[-1]) == bool(left_out)


def test_weights_are_those_given_or_those_that_the_file_names() -> None:
    config, inputs = config_of(), Path("global_step_7")
    assert locate_weights(config, inputs) == (inputs, inputs)
    with pytest.raises(ConfigError, match="no weights are named"):
        locate_weights(config, None)
    assert locate_weights(config_of({"model": {"model_path": "model"}}), None) == (None, Path("model").absolute())
    loaded = config_of({"checkpoint_load_path": "global_step_3", "model": {"model_path": "model"}})
    assert locate_weights(loaded, None) == (Path("global_step_3").absolute(), Path("global_step_3").absolute())


def config_of(actor: Any = None, **env: Any) -> EmbodiedConfig:
    place = {"actor,rollout,env": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": place}
    return EmbodiedConfig.model_validate({"recipe": "embodied", "cluster": cluster, "env": env, "actor": actor or {}})


def test_starts_of_training_are_refused() -> None:
    refused = shared_starts(config_of(train={"seed": 7}, eval={"seed": 7}))
    assert "start from training starts" in known(refused).message
    assert shared_starts(config_of(train={"seed": 7})) is None


@pytest.mark.parametrize(
    ("env_type", "train", "test", "shared"),
    [
        ("libero", {}, {}, True),
        ("libero", {"initial_states": [0, 39]}, {"initial_states": [40, 49]}, False),
        ("libero", {"initial_states": [0, 40]}, {"initial_states": [40, 49]}, True),
        ("metaworld", {}, {}, True),
        ("metaworld", {}, {"goal_seed": 1}, False),
        ("robosuite", {}, {}, False),
    ],
)
def test_fixed_starts_of_training_are_refused(env_type: str, train: Any, test: Any, shared: bool) -> None:
    refused = shared_starts(config_of(train={"env_type": env_type, "options": train}, eval={"options": test}))
    assert (refused is not None) == shared


def test_ways_of_ending_are_counted_and_success_may_be_unknown() -> None:
    ends = ((True, "success"), (False, "dropped"), (False, "dropped"))
    episodes = [CollectedEpisode(n, 0, "a", 1, 0.0, solved, solved, how) for n, (solved, how) in enumerate(ends)]
    assert figures(episodes, judged=True)["outcomes"] == {"dropped": 2, "success": 1}
    result = figures([episode(0, "a", None, None)], judged=False)
    assert (result["success_once"], result["success_once_interval"]) == (None, None)


def test_success_may_be_reported_only_where_there_is_one() -> None:
    result = summary([episode(0, "a", None, None), episode(1, "b", None, None), episode(2, "b", True, True)])
    assert result["total"]["success_at_end"] == result["total"]["success_once"] == pytest.approx(1 / 3)
    assert {task: item["success_once"] for task, item in result["tasks"].items()} == {"a": 0, "b": 0.5}


def test_a_digest_tells_weights_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    assert digest([file], tmp_path) is None
    file.write_bytes(b"one")
    first = digest([file], tmp_path)
    assert first == digest([file], tmp_path)
    file.write_bytes(b"two")
    assert digest([file], tmp_path) != first


def collect(keep: Keep, chunk: int = 1, **settings: Any) -> list[CollectedEpisode]:
    env = make_env("franka_kin", EnvSettings(num_envs=3, task="reach", auto_reset=False, seed=3, **settings))
    collector = EpisodeCollector(env, 5, "reach", keep)
    while not collector.over:
        actions = env.expert()
        collector.step(np.repeat(known(actions)[:, None], chunk, axis=1))
    return collector.episodes()


def test_an_expert_solves_every_episode() -> None:
    episodes = collect("everything")
    assert [episode.env for episode in episodes] == [0, 1, 2]
    assert all(episode.success_once and episode.success_at_end and episode.reset == 5 for episode in episodes)
    assert all(episode.outcome == "success" for episode in episodes)
    assert len({episode.start["seed"] for episode in episodes}) == 3
    for item in episodes:
        assert {name: len(rows) for name, rows in item.columns.items()} == dict.fromkeys(
            ("states", "instructions", "actions", "rewards", "successes", "terminations"), item.length
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


class TwoStages(CountingEnv):
    """Its instruction changes after the second step."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=1, has_instructions=True)

    def _observe(self) -> Observation:
        return {**super()._observe(), "instructions": np.where(self.count < 2, "open it", "close it again")}


def test_rows_are_recorded_with_their_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TwoStages(EnvSettings(num_envs=1, max_episode_steps=3, auto_reset=False))
    collector = EpisodeCollector(env, 0, "", "everything")
    collector.step(np.zeros((1, 3, 1), np.float32))
    facts = {"aged_cameras": [], "control_hz": 10}
    collection = SimpleNamespace(facts=facts, spec=env.spec, episodes=lambda _: [collector.episodes()])
    monkeypatch.setattr(recording, "collecting", lambda *_: nullcontext(collection))
    job = SimpleNamespace(config=SimpleNamespace(env=SimpleNamespace(train=EnvironmentConfig())))
    recording.record(cast("Any", job), tmp_path / "set", episodes=1)
    data = load_demonstrations([tmp_path / "set"])
    assert [data.tasks[task] for task in data.task_of] == ["open it", "open it", "close it again"]


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


def filmed(
    kind: str, steps: int, chunk: int = 1, most: int = 9, budget: int = 2**28, **settings: Any
) -> list[EpisodeFrames]:
    """Return what is filmed of the expert."""
    env = make_env(kind, EnvSettings(num_envs=3, seed=3, **settings))
    env.reset(5)
    film = FrameRecorder(env, 5, budget)
    for _ in range(steps):
        actions = env.expert()
        env.step(np.repeat(known(actions)[:, None], chunk, axis=1))
    result = film.finish(most)
    assert env.watcher is None
    return result


@pytest.mark.parametrize("kind", ["franka_kin", "franka_vision"])
def test_an_episode_is_filmed_from_its_start_to_its_end(kind: str) -> None:
    results = filmed(kind, 60, auto_reset=True)
    assert [(film.env, film.reset, film.outcome) for film in results] == [(row, 5, "success") for row in range(3)]
    env = make_env(kind, EnvSettings(num_envs=3, seed=3, auto_reset=False))
    env.reset(5)
    seen = env.look(np.arange(3))
    assert seen is not None
    assert all(
        np.array_equal(result.frames[0], picture) for result, picture in zip(results, env.picture(seen), strict=True)
    )
    # The last picture is not that of the episode which began in its place.
    assert not any(np.array_equal(result.frames[0], result.frames[-1]) for result in results)


def test_every_action_is_a_frame_and_failures_have_names() -> None:
    films = filmed("franka_kin", 2, chunk=5, max_episode_steps=9, task="pick")
    assert {(len(film.frames), film.outcome) for film in films} == {(10, "not grasped")}
    assert {film.outcome for film in filmed("franka_kin", 1, max_episode_steps=1, task="reach")} == {"time out"}


def test_a_block_is_dropped() -> None:
    env = make_env("franka_kin", EnvSettings(num_envs=1, seed=3, task="pick", auto_reset=False))
    env.reset(0)
    held = False
    for _ in range(50):
        actions = env.expert()
        assert actions is not None
        held = held or bool(env.observe()["states"][0, 20])
        env.step(np.where(np.arange(8) == 7, -1.0, actions[:, None]).astype(np.float32) if held else actions[:, None])
    assert env.outcomes(np.arange(1), np.ones(1, np.bool_)) == ["dropped"]


def test_few_are_filmed_where_memory_is_little() -> None:
    assert [film.env for film in filmed("franka_vision", 60, budget=1)] == [0]
    assert len(filmed("franka_vision", 60, most=2)) == 2


def recorded_episodes(env: int, outcome: str, steps: int = 3, size: int = 6) -> EpisodeFrames:
    return EpisodeFrames(env, 0, outcome, np.full((steps, size, size, 3), 20 * env, np.uint8))


def test_episodes_are_tiles_that_stay_at_their_end() -> None:
    short, long = recorded_episodes(1, "success", 2).frames, recorded_episodes(2, "success", 4).frames
    pictures = list(tiled([short, long], solved=True, still=1))
    assert len(pictures) == 5
    assert len({picture.shape for picture in pictures}) == 1
    height, width = pictures[0].shape[:2]
    assert height % 2 == width % 2 == 0
    # Green once it is over, and what it showed stays.
    corner = [tuple(picture[0, 0].tolist()) for picture in pictures]
    assert corner[0] == (255, 255, 255)
    assert len(set(corner[1:])) == 1
    assert corner[1] != corner[0]
    assert (pictures[-1][20, 20] == 20).all()


def test_each_way_of_ending_has_a_video(tmp_path: Path) -> None:
    outcomes = ("time out", "success", *["time out"] * EPISODES)
    shown = [recorded_episodes(number, outcome) for number, outcome in enumerate(outcomes)]
    results = write_videos(pick_per_outcome(shown), tmp_path / "videos", "step-000001-")
    assert [result["file"] for result in results] == ["step-000001-success.mp4", "step-000001-time-out.mp4"]
    filmed = [0, *range(2, EPISODES + 1)]
    assert results[1]["episodes"] == [{"env": number, "reset": 0} for number in filmed]
    for item in results:
        pictures = [picture for _, picture in read_video(tmp_path / "videos" / item["file"])]
        assert len(pictures) == item["frames"]
    many = [recorded_episodes(number, f"failure {number}") for number in range(MOST_KINDS + 3)]
    assert len(write_videos(many, tmp_path / "many")) == MOST_KINDS


@pytest.mark.parametrize("frame", [np.ones((8, 8, 3)), np.ones((8, 8, 4), np.uint8), np.ones((8, 8), np.uint8)])
def test_images_that_no_video_takes_are_refused_at_the_start(
    frame: Any, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = counting()
    monkeypatch.setattr(env, "look", lambda rows: {"frame": np.stack([frame] * len(rows))})
    env.reset()
    with pytest.raises(EnvContractError, match=f"`frame` of `look` is {frame.dtype} "):
        FrameRecorder(env, 0)


def test_nothing_is_filmed_where_there_is_nothing_to_see(counting: Any) -> None:
    env = counting()
    env.reset()
    film = FrameRecorder(env, 0)
    assert not film.sees
    assert film.finish(9) == []
