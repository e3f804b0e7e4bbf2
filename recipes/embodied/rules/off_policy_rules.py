"""Rules of off-policy losses: their requirements and limits. Rules of single algorithms are in their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.off_policy_settings import DEFAULT_BATCH
from recipes.embodied.off_policy.algorithm import LOSS, algorithm_of
from recipes.sections.checks import Report, WorldSizes

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig


def check_off_policy(config: EmbodiedConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report settings that are incompatible with off-policy learning."""
    algorithm_of(config.algorithm).check(config, report)
    actors, loss = world_sizes.get("actor") or 1, config.algorithm.loss_type
    _check_sources(config, report)
    fsdp = config.actor.fsdp_config
    if actors > 1 and fsdp.sharding_strategy != "no_shard":
        report(
            ("actor", "fsdp_config", "sharding_strategy"),
            "conflicting-settings",
            f"`loss_type: {loss}` replicates all weights on each of {actors} actors",
            "write `sharding_strategy: no_shard`",
            about=[LOSS],
        )
    batch = config.actor.global_batch_size or DEFAULT_BATCH
    if batch % actors:
        report(
            ("actor", "global_batch_size"),
            "batch-not-divisible",
            f"a batch of {batch} transitions cannot be split evenly over {actors} actors",
            f"write `global_batch_size: {batch // actors * actors or actors}`",
        )
    for path, is_set in (
        (("actor", "enable_offload"), config.actor.enable_offload),
        (("actor", "fsdp_config", "gradient_checkpointing"), fsdp.gradient_checkpointing),
        (("actor", "model", "compile"), config.actor.model.compile),
    ):
        if is_set:
            message = f"`loss_type: {loss}` does not support `{path[-1]}`"
            report(path, "conflicting-settings", message, "remove it: policy and critics are small", about=[LOSS])
    if config.actor.model.precision != "fp32":
        message = f"`loss_type: {loss}` computes in fp32"
        report(("actor", "model", "precision"), "conflicting-settings", message, "write `fp32`", about=[LOSS])


def _check_sources(config: EmbodiedConfig, report: Report) -> None:
    """Require demonstrations, and no interventions, of losses that learn from records alone."""
    loss = config.algorithm.loss_type
    if not algorithm_of(config.algorithm).records_alone:
        return
    if not config.data.train_data_paths:
        report(
            ("data", "train_data_paths"),
            "missing-key",
            f"`loss_type: {loss}` learns from recorded transitions alone, but none are named",
            "name LeRobotDataset folders or HDF5 files with rewards; `rlinf record` creates them",
            about=[LOSS],
        )
    if config.env.train.intervention.source != NONE:
        report(
            ("env", "train", "intervention", "source"),
            "conflicting-settings",
            f"`loss_type: {loss}` does not learn from what happens in the run",
            "remove it, or write `loss_type: td3`",
            about=[LOSS],
        )
