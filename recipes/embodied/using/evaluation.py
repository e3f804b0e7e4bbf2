"""Reproducible evaluation: exact starts, confidence intervals and all inputs, recorded in `eval.json`.

`rlinf eval` calls `evaluate`, and `rlinf eval --play` calls `play`, which only shows the policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_config import EvalEnvironmentConfig
from recipes.embodied.config.env_types import is_simulator
from recipes.embodied.envs.base import SUCCESS
from recipes.embodied.episodes.collection_job import Collection, collecting
from recipes.embodied.episodes.collector import CollectedEpisode
from recipes.embodied.loop.frames import EpisodeFrames
from recipes.embodied.loop.videos import nothing_to_see, pick_per_outcome, tiled, write_videos
from recipes.embodied.models.folder_facts import STATISTICS
from recipes.embodied.rules.env_rules import options_of_simulator
from recipes.training.state.state_checkpoint import ACTOR
from rlinf_core import ConfigError, Job, RLinfError
from rlinf_core.foreign.files import open_regular
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.statistics import mean, wilson_interval

SCHEMA: Final = "rlinf.eval/1"
FILE: Final = "eval.json"
# The one key of `eval.json` that differs between two evaluations of the same weights.
TIMES: Final = "times"
_DIGESTED: Final = 2**20  # bytes at a time: weights may be larger than memory


def evaluate(
    job: Job,
    checkpoint: Path | None,
    folder: Path,
    *,
    episodes: int | None = None,
    allow_training_starts: bool = False,
    video: bool | None = None,
    emit: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run greedy episodes of `env.eval` with a policy, and write `eval.json` and `first_contact.json`.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`; None: the weights that the file names, `actor.checkpoint_load_path` or
            `actor.model.model_path`.
        folder: a new folder for the results.
        episodes: how many; None: `env.eval.total_num_envs` times `env.eval.rollout_epoch`.
        allow_training_starts: evaluate from starts that training sees.
        video: write videos, one for each way in which episodes ended; None: where that is possible.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, the starts are those of training, the environment cannot be made, or videos
            are wanted of one that has nothing to show.
        CheckpointError: the checkpoint cannot be read, or is of another model.
        DatasetError: videos are wanted and cannot be written.
    """
    config = cast("PolicyJob", job.config)
    shared = shared_starts(config)
    if shared is not None and not allow_training_starts:
        raise shared
    checkpoint, named = locate_weights(config, checkpoint)
    environments = config.env.eval
    wanted = episodes or environments.total_num_envs * environments.rollout_epoch
    films = _can_film(video, emit)
    watch = Stopwatch()
    # Which copies of one environment share a batch decides the last bits of what a policy computes: so it is kept.
    with collecting(config, environments, wanted, checkpoint, pretrained=checkpoint is None) as collection:
        collected, recorded_episodes = _collect(collection, wanted, environments, films, emit, required=video is True)
        errors = list(dict.fromkeys(error.text for error in collection.errors))
        facts, comparisons = collection.facts, collection.comparisons()
    folder.mkdir(parents=True)
    videos = write_videos(recorded_episodes, folder, environments.video_cfg.fps, environments.video_cfg.episodes)
    record = {
        "schema": SCHEMA,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": {
            "step": None if checkpoint is None else open_checkpoint(checkpoint).step,
            "sha256": digest(sorted((named if checkpoint is None else named / ACTOR).rglob("*")), named),
            "statistics_sha256": digest([named / STATISTICS], named),
        },
        "environment": {
            "env_type": environments.env_type,
            "task": environments.task,
            "options": dict(environments.options),
            "seed": environments.seed,
            "starts_of_training": shared is not None,
            "ignore_terminations": environments.in_training.ignore_terminations,
            "inference": environments.inference.model_dump(mode="json"),
            "num_envs": collection.num_envs,
            **{name: value for name, value in facts.items() if name != "versions"},
        },
        "policy": {
            **config.actor.model.model_dump(mode="json", exclude={"model_path", "trainable", "compile"}),
            "images": collection.images,
        },
        "versions": {**versions(), **facts["versions"]},
        **summary(collected),
        "left_out": wanted - len(collected),
        "env_errors": errors,
        "episodes": [_as_json(episode) for episode in collected],
        "videos": videos,
        TIMES: watch.times(),
    }
    note_comparisons(folder, comparisons)
    durable.write_whole(folder / FILE, json.dumps(record, indent=1) + "\n")
    return record


def locate_weights(config: PolicyJob, checkpoint: Path | None) -> tuple[Path | None, Path]:
    """Return the checkpoint to evaluate, if it is one, and the folder with the weights.

    Args:
        config: the whole file.
        checkpoint: the checkpoint that is given; None: what the file names.

    Raises:
        ConfigError: the file names none.
    """
    actor = config.actor
    if checkpoint is None and actor.checkpoint_load_path is not None:
        checkpoint = Path(actor.checkpoint_load_path)
    if checkpoint is not None:
        return checkpoint, checkpoint
    if actor.model.model_path is None:
        raise ConfigError(
            "no weights are named",
            where="actor.model.model_path",
            help="name a run or a checkpoint with `--checkpoint`, or a model folder with `actor.model.model_path`",
        )
    return None, Path(actor.model.model_path)


def _can_film(wanted: bool | None, emit: Callable[[str], None]) -> bool:
    """Return whether videos can be written, where they are not refused.

    Raises:
        DatasetError: they are asked for, and the package is missing.
    """
    if wanted is False:
        return False
    try:
        needed("av", "a video")
    except DatasetError as error:
        if wanted:
            raise
        emit(f"no videos: {error.message}")
        return False
    return True


def _collect(
    collection: Collection,
    wanted: int,
    environments: EvalEnvironmentConfig,
    films: bool,
    emit: Callable[[str], None],
    *,
    required: bool,
) -> tuple[list[CollectedEpisode], list[EpisodeFrames]]:
    """Return the collected episodes without those that were left out, and the frames for videos.

    Raises:
        ConfigError: videos are `required`, and the environment has nothing to show.
    """
    episodes: list[CollectedEpisode] = []
    recorded_episodes: list[EpisodeFrames] = []
    asked = 0
    for batch in collection.episodes("nothing", film=films):
        # Nothing takes the place of an episode that is left out: others would have another chance of success.
        batch = [episode for episode in batch if episode.env < wanted - asked]
        asked += min(collection.num_envs, wanted - asked)
        counted = {(episode.env, episode.reset) for episode in batch}
        episodes += batch
        if films:
            filmed = collection.recorded_episodes()
            if filmed is None:
                if required:
                    raise ConfigError("videos are not available", why=nothing_to_see(environments.env_type))
                films = False
                emit(f"no videos: {nothing_to_see(environments.env_type)}")
            kept = [film for film in filmed or () if (film.env, film.reset) in counted]
            recorded_episodes = pick_per_outcome([*recorded_episodes, *kept], environments.video_cfg.episodes)
        left_out = f", {asked - len(episodes)} left out: see the log of `env`" if asked > len(episodes) else ""
        emit(f"{asked} of {wanted} episodes{left_out}")
        if asked == wanted:
            break
    return episodes, recorded_episodes


def shared_starts(config: PolicyJob) -> ConfigError | None:
    """Return the error if the evaluation would use training starts; None: it would not."""
    train, test = config.env.train, config.env.eval
    if test.seed == train.seed:
        return ConfigError(
            "the evaluation would start from training starts: `env.eval.seed` and `env.train.seed` are both"
            f" {test.seed}",
            where="env.eval.seed",
            help="give `env.eval` another seed, or pass `--allow-training-starts`",
        )
    if (test.env_type, test.task) != (train.env_type, train.task) or not is_simulator(test.env_type):
        return None
    same = options_of_simulator(train).shared_starts(options_of_simulator(test))
    if same is None:
        return None
    return ConfigError(
        f"the evaluation would start from training starts: {same.what}",
        where="env.eval.options",
        help=f"{same.remedy}, or pass `--allow-training-starts`",
    )


def summary(episodes: Sequence[CollectedEpisode]) -> dict[str, Any]:
    """Return the metrics of all episodes and of each task, see `figures`."""
    tasks = sorted({episode.task for episode in episodes})
    return {
        "total": figures(episodes),
        "tasks": {task: figures([episode for episode in episodes if episode.task == task]) for task in tasks},
    }


def figures(episodes: Sequence[CollectedEpisode]) -> dict[str, Any]:
    """Return counts, means, and shares of success with Wilson's intervals (95 %), None where success is not known."""
    result: dict[str, Any] = {"episodes": len(episodes)}
    for name in ("success_at_end", "success_once"):
        solved = [getattr(episode, name) for episode in episodes]
        is_judged = bool(solved) and all(flag is not None for flag in solved)
        count = sum(map(bool, solved))
        result[name] = count / len(solved) if is_judged else None
        result[f"{name}_interval"] = list(wilson_interval(count, len(solved))) if is_judged else None
    kinds = [episode.outcome for episode in episodes]
    result["outcomes"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    result["return"] = mean([episode.total_reward for episode in episodes])
    result["episode_len"] = mean([float(episode.length) for episode in episodes])
    return result


def digest(files: Sequence[Path], folder: Path) -> str | None:
    """Return the SHA-256 of some files with their names in `folder`; None if there is none."""
    existing = [file for file in files if file.is_file()]
    hasher = hashlib.sha256()
    for file in existing:
        hasher.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with open_regular(file) as stream:
            while chunk := stream.read(_DIGESTED):
                hasher.update(chunk)
    return hasher.hexdigest() if existing else None


def _as_json(episode: CollectedEpisode) -> dict[str, Any]:
    return {
        "env": episode.env,
        "reset": episode.reset,
        "start": dict(episode.start),
        "task": episode.task,
        "outcome": episode.outcome,
        "success_at_end": episode.success_at_end,
        "success_once": episode.success_once,
        "return": episode.total_reward,
        "length": episode.length,
    }


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
