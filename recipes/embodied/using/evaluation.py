"""Reproducible evaluation: exact starts, confidence intervals and all inputs, recorded in `eval.json`.

`rlinf eval` calls `evaluate`, and `rlinf eval --play` calls `play`, which only shows the policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from recipes.demonstrations.columns import DatasetError, needed
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_config import EvalEnvironmentConfig
from recipes.embodied.config.env_types import is_simulator
from recipes.embodied.envs.running import SUCCESS
from recipes.embodied.loop.videos import FPS, EpisodeFrames, nothing_to_see, pick_per_outcome, tiled, write_videos
from recipes.embodied.models.folder_facts import STATISTICS
from recipes.embodied.rules.env_rules import options_of_simulator
from recipes.embodied.using.collection_job import Collection, collecting
from recipes.embodied.using.collector import CollectedEpisode
from recipes.training.weights.training_state import ACTOR
from rlinf_core import ConfigError, Job, RLinfError
from rlinf_core.foreign.files import open_regular
from rlinf_core.runners.metrics import mean, wilson_interval
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions
from rlinf_core.runners.storage.first_contact import note_comparisons

SCHEMA: Final = "rlinf.eval/1"
FILE: Final = "eval.json"
# The only key of `eval.json` that differs between two evaluations of the same weights.
TIMES: Final = "times"
_DIGESTED: Final = 2**20  # bytes at a time, since weights may be larger than memory


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
        job: the validated job.
        checkpoint: a folder `global_step_N`; None: the weights that the file names, `actor.checkpoint_load_path` or
            `actor.model.model_path`.
        folder: a new folder for the results.
        episodes: the number of episodes; None: `env.eval.total_num_envs` times `env.eval.rollout_epoch`.
        allow_training_starts: whether to evaluate from starts of training.
        video: whether to write videos, one for each outcome; None: if possible.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, the starts are those of training, the environment cannot be made, or videos
            are requested of one without images.
        CheckpointError: the checkpoint cannot be read, or is of another model.
        DatasetError: videos are requested and cannot be written.
    """
    config = cast("PolicyJob", job.config)
    shared = shared_starts(config)
    if shared is not None and not allow_training_starts:
        raise shared
    checkpoint, named = locate_weights(config, checkpoint)
    environments = config.env.eval
    wanted = episodes or environments.total_num_envs * environments.rollout_epoch
    films = _can_film(video, emit)
    # Before the episodes: an active run may remove its checkpoint meanwhile.
    evaluated = _weights(checkpoint, named)
    watch = Stopwatch()
    # The placement of environments in batches affects the last bits of a policy's output, and is therefore kept.
    with collecting(config, environments, wanted, checkpoint, pretrained=checkpoint is None) as collection:
        collected, recorded_episodes = _collect(collection, wanted, environments, films, emit, required=video is True)
        errors = list(dict.fromkeys(error.text for error in collection.errors))
        facts, comparisons = collection.facts, collection.comparisons()
    folder.mkdir(parents=True)
    videos = write_videos(recorded_episodes, folder)
    record = {
        "schema": SCHEMA,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": evaluated,
        **_setting(config, collection, facts, starts_of_training=shared is not None),
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


def _weights(checkpoint: Path | None, folder: Path) -> dict[str, Any]:
    """Return what `eval.json` says of the evaluated weights.

    Args:
        checkpoint: the checkpoint; None: the weights are those of a model folder.
        folder: the checkpoint or the model folder.
    """
    return {
        "step": None if checkpoint is None else open_checkpoint(checkpoint).step,
        "sha256": digest(sorted((folder if checkpoint is None else folder / ACTOR).rglob("*")), folder),
        "statistics_sha256": digest([folder / STATISTICS], folder),
    }


def _setting(
    config: PolicyJob, collection: Collection, facts: Mapping[str, Any], *, starts_of_training: bool
) -> dict[str, Any]:
    """Return what `eval.json` says of the environments and the policy.

    Args:
        config: the configuration of the job.
        collection: the collection of the episodes.
        facts: the facts of its environments.
        starts_of_training: whether the episodes began as those of training.
    """
    environments, model = config.env.eval, config.actor.model
    return {
        "environment": {
            "env_type": environments.env_type,
            "task": environments.task,
            "options": dict(environments.options),
            "seed": environments.seed,
            "starts_of_training": starts_of_training,
            "ignore_terminations": environments.in_training.ignore_terminations,
            "inference": {"chunking": "ensemble" if model.options.get("ensemble") else "wait"},
            "num_envs": collection.num_envs,
            **{name: value for name, value in facts.items() if name != "versions"},
        },
        "policy": {
            **model.model_dump(mode="json", exclude={"model_path", "trainable", "compile"}),
            "images": collection.images,
        },
    }


def locate_weights(config: PolicyJob, checkpoint: Path | None) -> tuple[Path | None, Path]:
    """Return the checkpoint to evaluate, if it is one, and the folder with the weights.

    Args:
        config: the configuration of the job.
        checkpoint: the given checkpoint; None: the file names the weights.

    Raises:
        ConfigError: the file names no weights.
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
    """Return whether videos are wanted and can be written.

    Raises:
        DatasetError: videos are requested, and the package is missing.
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
    """Return the collected episodes without dropped ones, and the frames for videos.

    Raises:
        ConfigError: videos are `required`, and the environment has no images.
    """
    episodes: list[CollectedEpisode] = []
    recorded_episodes: list[EpisodeFrames] = []
    asked = 0
    for batch in collection.episodes("nothing", film=films):
        # Dropped episodes are not replaced: another episode would be another chance of success.
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
            recorded_episodes = pick_per_outcome([*recorded_episodes, *kept])
        left_out = f", {asked - len(episodes)} left out: see the log of `env`" if asked > len(episodes) else ""
        emit(f"{asked} of {wanted} episodes{left_out}")
        if asked == wanted:
            break
    return episodes, recorded_episodes


def shared_starts(config: PolicyJob) -> ConfigError | None:
    """Return the error if the evaluation would use training starts; None if not."""
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
    # An environment may report success only where there is one: then no other episode was solved.
    judged = any(episode.success_at_end is not None for episode in episodes)
    return {
        "total": figures(episodes, judged=judged),
        "tasks": {task: figures([item for item in episodes if item.task == task], judged=judged) for task in tasks},
    }


def figures(episodes: Sequence[CollectedEpisode], *, judged: bool) -> dict[str, Any]:
    """Return counts, means, and shares of success with Wilson's intervals (95 %), None if success is unknown."""
    result: dict[str, Any] = {"episodes": len(episodes)}
    for name in ("success_at_end", "success_once"):
        count = sum(bool(getattr(episode, name)) for episode in episodes)
        result[name] = count / len(episodes) if judged else None
        result[f"{name}_interval"] = list(wilson_interval(count, len(episodes))) if judged else None
    kinds = [episode.outcome for episode in episodes]
    result["outcomes"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    result["return"] = mean([episode.total_reward for episode in episodes])
    result["episode_len"] = mean([float(episode.length) for episode in episodes])
    return result


def digest(files: Sequence[Path], folder: Path) -> str | None:
    """Return the SHA-256 of some files with their names in `folder`; None without files."""
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
        job: the validated job.
        checkpoint: a folder `global_step_N`.
        file: the video, an mp4; must not exist.
        episodes: the number of episodes.
        emit: receives progress lines.

    Returns:
        `file`, `fps`, and for each of `episodes` its `env`, `outcome`, `return` and `length`.

    Raises:
        ConfigError: the environment has no images, or cannot be made.
        CheckpointError: the checkpoint cannot be read, or is of another model.
        DatasetError: the package `av` is missing, or the video cannot be written.
        RLinfError: the file exists.
    """
    if file.exists():
        raise RLinfError("the video exists", where=str(file), help="name another with `-o`")
    needed("av", "a video")
    config = cast("PolicyJob", job.config)
    environments = config.env.eval
    chosen = environments.model_copy(update={"total_num_envs": episodes})
    env = config.env.model_copy(update={"eval": chosen})
    with collecting(config.model_copy(update={"env": env}), chosen, episodes, checkpoint) as collection:
        collected = next(iter(collection.episodes("nothing", film=True)))[:episodes]
        recorded_episodes = collection.recorded_episodes(episodes)
    if recorded_episodes is None:
        raise ConfigError("there is nothing to play", why=nothing_to_see(environments.env_type))
    emit(f"{len(collected)} episodes")
    file.parent.mkdir(parents=True, exist_ok=True)
    films = [film for film in recorded_episodes if film.env in {episode.env for episode in collected}]
    solved = [film.outcome == SUCCESS for film in films]
    write_video(file, tiled([film.frames for film in films], solved=solved, still=FPS), FPS)
    return {
        "file": str(file),
        "fps": FPS,
        "episodes": [
            {"env": episode.env, "outcome": episode.outcome, "return": episode.total_reward, "length": episode.length}
            for episode in collected
        ],
    }
