"""A trained policy to look at: `rlinf eval --play` calls `play`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from recipes.demonstrations.data_errors import needed
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.base import SUCCESS
from recipes.embodied.episodes.collection_job import collecting
from recipes.embodied.loop.videos import nothing_to_see, tiled
from rlinf_core import ConfigError, Job, RLinfError


def play(
    job: Job,
    checkpoint: Path,
    file: Path,
    *,
    episodes: int,
    emit: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Have the policy of a checkpoint act greedily in episodes of `env.eval`, side by side in one video.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`.
        file: the video, an mp4; must not exist.
        episodes: the number of episodes.
        emit: receives progress lines.

    Returns:
        `file`, `fps`, and for each of `episodes` its `env`, `outcome`, `return` and `length`.

    Raises:
        ConfigError: the environment gives no pictures, or cannot be made.
        CheckpointError: the checkpoint cannot be read, or is of another model.
        DatasetError: the package `av` is missing, or the video cannot be written.
        RLinfError: the file exists.
    """
    if file.exists():
        raise RLinfError("the video exists", where=str(file), help="name another with `-o`")
    needed("av", "a video")
    config = cast("PolicyJob", job.config)
    environments = config.env.eval
    shown = environments.video_cfg.model_copy(update={"episodes": episodes})
    chosen = environments.model_copy(update={"total_num_envs": episodes, "video_cfg": shown})
    env = config.env.model_copy(update={"eval": chosen})
    with collecting(config.model_copy(update={"env": env}), chosen, episodes, checkpoint) as collection:
        collected = next(iter(collection.episodes("nothing", film=True)))[:episodes]
        recorded_episodes = collection.recorded_episodes()
    if recorded_episodes is None:
        raise ConfigError("there is nothing to play", why=nothing_to_see(environments.env_type))
    emit(f"{len(collected)} episodes")
    file.parent.mkdir(parents=True, exist_ok=True)
    films = [film for film in recorded_episodes if film.env in {episode.env for episode in collected}]
    solved = [film.outcome == SUCCESS for film in films]
    fps = environments.video_cfg.fps
    write_video(file, tiled([film.frames for film in films], solved=solved, still=fps), fps)
    return {
        "file": str(file),
        "fps": fps,
        "episodes": [
            {"env": episode.env, "outcome": episode.outcome, "return": episode.total_reward, "length": episode.length}
            for episode in collected
        ],
    }
