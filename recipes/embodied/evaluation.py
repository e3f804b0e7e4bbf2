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

from recipes.embodied.collecting import CollectedEpisode
from recipes.embodied.collection import collecting
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.models.normalization import FILE_NAME
from recipes.training.checkpoint import ACTOR
from rlinf_core import ConfigError, Job
from rlinf_core.runners import durable
from rlinf_core.runners.checkpoint import open_checkpoint, versions
from rlinf_core.runners.statistics import mean, wilson_interval

SCHEMA: Final = "rlinf.eval/1"
FILE: Final = "eval.json"
# The one key of `eval.json` that differs between two evaluations of the same weights.
TIMES: Final = "times"


def evaluate(
    job: Job,
    checkpoint: Path,
    folder: Path,
    *,
    episodes: int | None = None,
    allow_training_starts: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Have the policy of a checkpoint act greedily in whole episodes of `env.eval`, and write `eval.json`.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`.
        folder: a new folder for the results.
        episodes: how many; None: `env.eval.total_num_envs` times `env.eval.rollout_epoch`.
        allow_training_starts: evaluate from starts that training sees.
        tell: is told how it goes.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: the starts are those of training, or the environment cannot be made.
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    config = cast("EmbodiedConfig", job.config)
    if not allow_training_starts:
        check_starts(config)
    environments = config.env.eval
    wanted = episodes or environments.total_num_envs * environments.rollout_epoch
    found: list[CollectedEpisode] = []
    began = time.time()
    # Which copies of one environment share a batch decides the last bits of what a policy computes: so it is kept.
    with collecting(config, environments, wanted, checkpoint) as collection:
        for batch in collection.episodes("nothing"):
            found += batch
            tell(f"{min(len(found), wanted)} of {wanted} episodes")
            if len(found) >= wanted:
                break
        facts = collection.facts
    found = found[:wanted]
    record = {
        "schema": SCHEMA,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": {
            "step": open_checkpoint(checkpoint).step,
            "sha256": digest(sorted((checkpoint / ACTOR).rglob("*")), checkpoint),
            "statistics_sha256": digest([checkpoint / FILE_NAME], checkpoint),
        },
        "environment": {
            "env_type": environments.env_type,
            "task": environments.task,
            "options": dict(environments.options),
            "seed": environments.seed,
            "ignore_terminations": environments.ignore_terminations,
            "num_action_chunks": config.actor.model.num_action_chunks,
            **{name: value for name, value in facts.items() if name != "versions"},
        },
        "versions": {**versions(), **facts["versions"]},
        **summary(found),
        "episodes": [_as_json(each) for each in found],
        TIMES: {"began": began, "seconds": time.time() - began},
    }
    folder.mkdir(parents=True)
    durable.write_whole(folder / FILE, json.dumps(record, indent=1) + "\n")
    return record


def check_starts(config: EmbodiedConfig) -> None:
    """Refuse starts that training sees.

    Raises:
        ConfigError: `env.eval` and `env.train` have the same seed.
    """
    if config.env.eval.seed == config.env.train.seed:
        raise ConfigError(
            f"the evaluation would begin where training did: `env.eval.seed` and `env.train.seed` are both"
            f" {config.env.eval.seed}",
            where="env.eval.seed",
            help="give `env.eval` another seed, or say `--allow-training-starts`",
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
    found["return"] = mean([each.total_reward for each in episodes])
    found["episode_len"] = mean([float(each.length) for each in episodes])
    return found


def digest(files: Sequence[Path], folder: Path) -> str | None:
    """Return the SHA-256 of some files with their names in `folder`; None where none is there."""
    there = [file for file in files if file.is_file()]
    found = hashlib.sha256()
    for file in there:
        found.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest() if there else None


def _as_json(episode: CollectedEpisode) -> dict[str, Any]:
    return {
        "env": episode.env,
        "reset": episode.reset,
        "task": episode.task,
        "success_at_end": episode.success_at_end,
        "success_once": episode.success_once,
        "return": episode.total_reward,
        "length": episode.length,
    }
