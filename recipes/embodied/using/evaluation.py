"""Evaluations whose number can be trusted: exact starts, intervals, and what the number depends on, as `eval.json`.

`rlinf eval` calls `evaluate`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.config.env_types import is_simulator
from recipes.embodied.episodes.collection_job import Collection, collecting
from recipes.embodied.episodes.collector import CollectedEpisode
from recipes.embodied.loop.frames import Footage
from recipes.embodied.loop.videos import few_of_each, nothing_to_see, write_videos
from recipes.embodied.models.folder_facts import STATISTICS
from recipes.embodied.rules.env_rules import options_of_simulator
from recipes.training.state.state_checkpoint import ACTOR
from recipes.training.statistics import mean, wilson_interval
from rlinf_core import ConfigError, Job
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions

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
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Have a policy act greedily in whole episodes of `env.eval`, and write `eval.json`.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`; None: the weights that the file names, `actor.checkpoint_load_path` or
            `actor.model.model_path`.
        folder: a new folder for the results.
        episodes: how many; None: `env.eval.total_num_envs` times `env.eval.rollout_epoch`.
        allow_training_starts: evaluate from starts that training sees.
        video: write videos, one for each way in which episodes ended; None: where that is possible.
        tell: is told how it goes.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, the starts are those of training, the environment cannot be made, or videos
            are wanted of one that has nothing to show.
        CheckpointError: the checkpoint cannot be read, or is of another model.
        DatasetError: videos are wanted and cannot be written.
    """
    config = cast("EmbodiedConfig", job.config)
    shared = shared_starts(config)
    if shared is not None and not allow_training_starts:
        raise shared
    checkpoint, named = weights_of(config, checkpoint)
    environments = config.env.eval
    wanted = episodes or environments.total_num_envs * environments.rollout_epoch
    films = _can_film(video, tell)
    began = time.time()
    # Which copies of one environment share a batch decides the last bits of what a policy computes: so it is kept.
    with collecting(config, environments, wanted, checkpoint, pretrained=checkpoint is None) as collection:
        found, footage = _collect(collection, wanted, environments, films, tell, required=video is True)
        facts = collection.facts
    folder.mkdir(parents=True)
    videos = write_videos(footage, folder, environments.video_cfg.fps, environments.video_cfg.episodes)
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
            "ignore_terminations": environments.ignore_terminations,
            "num_envs": collection.num_envs,
            **{name: value for name, value in facts.items() if name != "versions"},
        },
        "policy": {
            **config.actor.model.model_dump(mode="json", exclude={"model_path", "trainable", "compile"}),
            "images": collection.images,
        },
        "versions": {**versions(), **facts["versions"]},
        **summary(found),
        "episodes": [_as_json(each) for each in found],
        "videos": videos,
        TIMES: {"began": began, "seconds": time.time() - began},
    }
    durable.write_whole(folder / FILE, json.dumps(record, indent=1) + "\n")
    return record


def weights_of(config: EmbodiedConfig, checkpoint: Path | None) -> tuple[Path | None, Path]:
    """Return the checkpoint whose weights are evaluated, if it is one, and the folder that holds the weights.

    Args:
        config: the whole file.
        checkpoint: that is given; None: what the file names.

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
            help="name a run or a checkpoint by `--checkpoint`, or the folder of a model by `actor.model.model_path`",
        )
    return None, Path(actor.model.model_path)


def _can_film(wanted: bool | None, tell: Callable[[str], None]) -> bool:
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
        tell(f"no videos: {error.message}")
        return False
    return True


def _collect(
    collection: Collection,
    wanted: int,
    environments: EnvironmentConfig,
    films: bool,
    tell: Callable[[str], None],
    *,
    required: bool,
) -> tuple[list[CollectedEpisode], list[Footage]]:
    """Return so many episodes, and those of them that videos show.

    Raises:
        ConfigError: videos are `required`, and the environment has nothing to show.
    """
    found: list[CollectedEpisode] = []
    footage: list[Footage] = []
    for batch in collection.episodes("nothing", film=films):
        counted = {(each.env, each.reset) for each in batch[: wanted - len(found)]}
        found += batch
        if films:
            filmed = collection.footage()
            if filmed is None:
                if required:
                    raise ConfigError("there can be no videos", why=nothing_to_see(environments.env_type))
                films = False
                tell(f"no videos: {nothing_to_see(environments.env_type)}")
            kept = [each for each in filmed or () if (each.env, each.reset) in counted]
            footage = few_of_each([*footage, *kept], environments.video_cfg.episodes)
        tell(f"{min(len(found), wanted)} of {wanted} episodes")
        if len(found) >= wanted:
            break
    return found[:wanted], footage


def shared_starts(config: EmbodiedConfig) -> ConfigError | None:
    """Return the reason, as an error, for which the evaluation would begin where training did; None: it would not."""
    train, test = config.env.train, config.env.eval
    if test.seed == train.seed:
        return ConfigError(
            f"the evaluation would begin where training did: `env.eval.seed` and `env.train.seed` are both {test.seed}",
            where="env.eval.seed",
            help="give `env.eval` another seed, or say `--allow-training-starts`",
        )
    if (test.env_type, test.task) != (train.env_type, train.task) or not is_simulator(test.env_type):
        return None
    same = options_of_simulator(train).shared_starts(options_of_simulator(test))
    if same is None:
        return None
    return ConfigError(
        f"the evaluation would begin where training did: {same.what}",
        where="env.eval.options",
        help=f"{same.remedy}, or say `--allow-training-starts`",
    )


def summary(episodes: Sequence[CollectedEpisode]) -> dict[str, Any]:
    """Return the figures of all episodes and of each task, see `figures`."""
    tasks = sorted({each.task for each in episodes})
    return {
        "total": figures(episodes),
        "tasks": {task: figures([each for each in episodes if each.task == task]) for task in tasks},
    }


def figures(episodes: Sequence[CollectedEpisode]) -> dict[str, Any]:
    """Return counts, means, and shares of success with Wilson's intervals (95 %), None where success is not known."""
    found: dict[str, Any] = {"episodes": len(episodes)}
    for name in ("success_at_end", "success_once"):
        solved = [getattr(each, name) for each in episodes]
        known = bool(solved) and all(each is not None for each in solved)
        count = sum(map(bool, solved))
        found[name] = count / len(solved) if known else None
        found[f"{name}_interval"] = list(wilson_interval(count, len(solved))) if known else None
    kinds = [each.outcome for each in episodes]
    found["outcomes"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    found["return"] = mean([each.total_reward for each in episodes])
    found["episode_len"] = mean([float(each.length) for each in episodes])
    return found


def digest(files: Sequence[Path], folder: Path) -> str | None:
    """Return the SHA-256 of some files with their names in `folder`; None where none is there."""
    there = [file for file in files if file.is_file()]
    found = hashlib.sha256()
    for file in there:
        found.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_DIGESTED):
                found.update(chunk)
    return found.hexdigest() if there else None


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
