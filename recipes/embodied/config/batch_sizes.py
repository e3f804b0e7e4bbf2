"""Batch sizes: samples of a training step by actor, optimizer step and micro batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.embodied.config.embodied_config import group_size
from recipes.sections.checks import Report, blame, divisors
from rlinf_core.config.tree import Path

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig

# Optimizer steps per pass over the samples if the file sets no batch size; the first that divides evenly is taken.
_STEPS_A_PASS = (4, 5, 3)


def samples_of_a_step(config: EmbodiedConfig) -> int:
    """Return the number of samples (action chunks) of a training step over all actors."""
    train = config.env.train
    chunks = -(-train.max_steps_per_rollout_epoch // config.actor.model.num_action_chunks)
    return train.total_num_envs * chunks * train.rollout_epoch


def evaluates(config: EmbodiedConfig) -> bool:
    """Return whether the run evaluates at all."""
    return config.runner.only_eval or config.runner.val_check_interval != -1


def divides_among(config: EmbodiedConfig, workers: int) -> bool:
    """Return whether the environments split evenly, in whole groups, over the pipeline stages of this many workers."""
    sections = [config.env.train, *([config.env.eval] if evaluates(config) else [])]
    shares = workers * config.rollout.pipeline_stage_num
    return all(section.total_num_envs % (shares * group_size(config, section)) == 0 for section in sections)


def samples_of_an_actor(samples: int, actors: int) -> int:
    """Return the number of samples per actor; if they do not divide evenly, the last ones are padding."""
    return -(-samples // actors)


def batch_sizes(config: EmbodiedConfig, actors: int) -> tuple[int, int]:
    """Return the samples of an optimizer step on one actor, and of a forward and backward pass.

    Without `actor.global_batch_size`, a pass over the samples takes about four optimizer steps.
    """
    total = config.actor.global_batch_size
    if total is not None:
        share = max(1, total // actors)
    else:
        mine = samples_of_an_actor(samples_of_a_step(config), actors)
        steps = next((count for count in _STEPS_A_PASS if mine % count == 0), _STEPS_A_PASS[0])
        share = -(-mine // steps)
    return share, min(config.actor.micro_batch_size or share, share)


def check_batches(config: EmbodiedConfig, actors: int, report: Report) -> None:
    """Report a batch size that does not divide evenly, and suggest one that does."""
    actor, train, chunk = config.actor, config.env.train, config.actor.model.num_action_chunks
    total, micro = actor.global_batch_size, actor.micro_batch_size
    if total is None or train.max_steps_per_rollout_epoch % chunk:
        return  # chosen to fit, or reported with the steps
    unit = (micro or 1) * actors
    samples = samples_of_a_step(config)
    ranks = f"{actors} rank{'s' if actors > 1 else ''}"
    batch: Path = ("actor", "global_batch_size")
    if total % unit:
        by = f"(micro_batch_size {micro} x {ranks} = {unit})" if micro else ranks
        at = blame(config, ("actor", "micro_batch_size"), batch, ("actor",))
        message = f"`actor.global_batch_size` does not divide evenly: {total} / {by} = {total / unit:g}"
    elif samples % total:
        names = ("max_steps_per_rollout_epoch", "total_num_envs", "rollout_epoch")
        sources: list[Path] = [*(("env", "train", name) for name in names), ("actor", "model", "num_action_chunks")]
        at = blame(config, batch, *sources, ("actor",))
        message = (
            f"a step has {_arithmetic(config)} = {samples} samples, not a multiple of `actor.global_batch_size` {total}"
        )
    else:
        return
    report(at, "batch-not-divisible", message, _remedy(samples, total, actors, micro))


def _arithmetic(config: EmbodiedConfig) -> str:
    train, chunk = config.env.train, config.actor.model.num_action_chunks
    text = f"total_num_envs {train.total_num_envs} x max_steps_per_rollout_epoch {train.max_steps_per_rollout_epoch}"
    text += f" / num_action_chunks {chunk}" if chunk > 1 else ""
    return text + (f" x rollout_epoch {train.rollout_epoch}" if train.rollout_epoch > 1 else "")


def _remedy(samples: int, wanted: int, actors: int, micro: int | None) -> str:
    """Return batch sizes near the wanted one that divide the samples into whole micro batches on every actor."""
    removed = "remove it: a batch is then about a quarter of a step's samples"
    for size in dict.fromkeys((micro, None)):
        unit = (size or 1) * actors
        if samples % unit:
            continue
        fitting = [unit * divisor for divisor in divisors(samples // unit)]
        near = [
            *[near_size for near_size in fitting if near_size < wanted][-1:],
            *[near_size for near_size in fitting if near_size >= wanted][:1],
        ]
        also = ", without `actor.micro_batch_size`" if size != micro else ""
        return f"nearest valid `actor.global_batch_size`: {' or '.join(map(str, near))}{also}; or {removed}"
    return f"{actors} actors cannot split {samples} samples evenly with a fixed batch size: {removed}"
