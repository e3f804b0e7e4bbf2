"""Films of episodes, and the videos made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.pictures import read_video
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.loop.frames import EpisodeFrames, FrameRecorder
from recipes.embodied.loop.videos import MOST_KINDS, pick_per_outcome, tiled, write_videos


def filmed(
    kind: str, steps: int, chunk: int = 1, most: int = 9, budget: int = 2**28, **settings: Any
) -> list[EpisodeFrames]:
    """Return what is filmed of the expert."""
    env = make_env(kind, EnvSettings(num_envs=3, seed=3, **settings))
    env.reset(5)
    film = FrameRecorder(env, 5, budget)
    for _ in range(steps):
        actions = env.expert()
        assert actions is not None
        env.step(np.repeat(actions[:, None], chunk, axis=1))
    result = film.finish(most)
    assert env.watcher is None
    return result


@pytest.mark.parametrize("kind", ["franka_kin", "franka_vision"])
def test_an_episode_is_filmed_from_its_start_to_its_end(kind: str) -> None:
    results = filmed(kind, 60, auto_reset=True)
    assert [(result.env, result.reset, result.outcome) for result in results] == [
        (row, 5, "success") for row in range(3)
    ]
    env = make_env(kind, EnvSettings(num_envs=3, seed=3, auto_reset=False))
    env.reset(5)
    seen = env.look(np.arange(3))
    assert seen is not None
    assert all(
        np.array_equal(result.frames[0], picture) for result, picture in zip(results, env.picture(seen), strict=True)
    )
    # The last picture is not that of the episode which began in its place.
    assert not any(np.array_equal(result.frames[0], result.frames[-1]) for result in results)


def test_every_action_of_a_chunk_is_a_frame() -> None:
    lengths = {len(film.frames) for film in filmed("franka_kin", 2, chunk=5, max_episode_steps=9, task="pick")}
    assert lengths == {10}


def test_failures_have_names() -> None:
    assert {film.outcome for film in filmed("franka_kin", 5, max_episode_steps=5, task="pick")} == {"not grasped"}
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
    shown = [
        recorded_episodes(0, "time out"),
        recorded_episodes(1, "success"),
        recorded_episodes(2, "time out"),
        recorded_episodes(3, "time out"),
    ]
    results = write_videos(pick_per_outcome(shown, 2), tmp_path / "videos", 10, 2, "step-000001-")
    assert [result["file"] for result in results] == ["step-000001-success.mp4", "step-000001-time-out.mp4"]
    assert results[1]["episodes"] == [{"env": 0, "reset": 0}, {"env": 2, "reset": 0}]
    for item in results:
        pictures = [picture for _, picture in read_video(tmp_path / "videos" / item["file"])]
        assert len(pictures) == item["frames"]
    many = [recorded_episodes(number, f"failure {number}") for number in range(MOST_KINDS + 3)]
    assert len(write_videos(many, tmp_path / "many", 10, 2)) == MOST_KINDS


def test_nothing_is_filmed_where_there_is_nothing_to_see(counting: Any) -> None:
    env = counting()
    env.reset()
    film = FrameRecorder(env, 0)
    assert not film.sees
    assert film.finish(9) == []
