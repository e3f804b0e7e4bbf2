"""Rules of `loss_type: sac` and `td3`: their requirements and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.off_policy_config import (
    DEFAULT_BATCH,
    DETERMINISTIC_LOSSES,
    IMPLICIT_LOSS,
    RECORDED_LOSSES,
)
from recipes.sections.checks import Report, WorldSizes, blame
from rlinf_core.config.tree import Path

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig

POLICY: Final = "squashed_policy"
_LOSS: Final[Path] = ("algorithm", "loss_type")


def check_off_policy(config: EmbodiedConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report settings that are incompatible with SAC and TD3."""
    _check_policy(config, report)
    settings, actors = config.algorithm.off_policy, world_sizes.get("actor") or 1
    at: Path = ("algorithm", "off_policy")
    if settings.critics_in_target > settings.critics:
        report(
            blame(config, (*at, "critics_in_target"), (*at, "critics")),
            "conflicting-settings",
            f"`critics_in_target: {settings.critics_in_target}` exceeds `critics: {settings.critics}`",
            f"write at most {settings.critics}",
        )
    _check_shares(config, report)
    _check_memory(config, report)
    fsdp = config.actor.fsdp_config
    if actors > 1 and fsdp.sharding_strategy != "no_shard":
        report(
            ("actor", "fsdp_config", "sharding_strategy"),
            "conflicting-settings",
            f"`loss_type: {config.algorithm.loss_type}` replicates all weights on each of {actors} actors",
            "write `sharding_strategy: no_shard`",
            about=[_LOSS],
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
            message = f"`loss_type: {config.algorithm.loss_type}` does not support `{path[-1]}`"
            report(path, "conflicting-settings", message, "remove it: policy and critics are small", about=[_LOSS])
    if config.actor.model.precision != "fp32":
        message = f"`loss_type: {config.algorithm.loss_type}` computes in fp32"
        report(("actor", "model", "precision"), "conflicting-settings", message, "write `fp32`", about=[_LOSS])


def _check_shares(config: EmbodiedConfig, report: Report) -> None:
    """Require that something is left for the steps of the policy itself."""
    replay, at = config.algorithm.off_policy.replay, ("algorithm", "off_policy", "replay")
    loss = config.algorithm.loss_type
    records_alone = loss in RECORDED_LOSSES
    if records_alone and not config.data.train_data_paths:
        report(
            ("data", "train_data_paths"),
            "missing-key",
            f"`loss_type: {loss}` learns from recorded transitions alone, but none are named",
            "name LeRobotDataset folders or HDF5 files with rewards; `rlinf record` creates them",
            about=[_LOSS],
        )
    if records_alone and config.env.train.intervention.source != NONE:
        report(
            ("env", "train", "intervention", "source"),
            "conflicting-settings",
            f"`loss_type: {loss}` does not learn from what happens in the run",
            "remove it, or write `loss_type: td3`",
            about=[_LOSS],
        )
        return
    shown = replay.demonstrations_share if not records_alone and config.data.train_data_paths else 0.0
    helped = replay.interventions_share if config.env.train.intervention.source != NONE else 0.0
    if shown + helped > 1:
        report(
            blame(config, (*at, "interventions_share"), (*at, "demonstrations_share")),
            "conflicting-settings",
            f"`demonstrations_share: {shown:g}` and `interventions_share: {helped:g}` exceed the whole batch",
            "write shares whose sum is at most 1",
        )


def _check_memory(config: EmbodiedConfig, report: Report) -> None:
    """Require a spill folder for a bounded memory, and at most one kind of bound."""
    replay, at = config.algorithm.off_policy.replay, ("algorithm", "off_policy", "replay")
    if replay.memory_gib is None:
        return
    if replay.spill_path is None:
        report(
            (*at, "memory_gib"),
            "conflicting-settings",
            f"`memory_gib: {replay.memory_gib:g}` spills to a folder, but none is set",
            "write `spill_path`, a folder on a disk of the actors' node",
        )
    if replay.image_memory_gib is not None:
        report(
            blame(config, (*at, "image_memory_gib"), (*at, "memory_gib")),
            "conflicting-settings",
            "`image_memory_gib` compresses images and drops the oldest; `memory_gib` keeps all of them in files",
            "remove one of them",
        )


def _check_policy(config: EmbodiedConfig, report: Report) -> None:
    model, loss = config.actor.model, config.algorithm.loss_type
    kind: Path = ("actor", "model", "model_type")
    if model.model_type != POLICY:
        report(
            blame(config, kind, _LOSS),
            "conflicting-settings",
            f"`loss_type: {loss}` trains a `{POLICY}`, but `model_type` is `{model.model_type}`",
            f"write `actor.model.model_type: {POLICY}`",
        )
        return
    if model.num_action_chunks != 1:
        report(
            ("actor", "model", "num_action_chunks"),
            "conflicting-settings",
            f"`loss_type: {loss}` learns the value of single actions",
            "write `num_action_chunks: 1`",
            about=[_LOSS],
        )
    noise = model.options.get("exploration_noise")
    at: Path = ("actor", "model", "options", "exploration_noise")
    if loss in DETERMINISTIC_LOSSES and noise is None:
        report(
            blame(config, at, _LOSS),
            "conflicting-settings",
            f"`loss_type: {loss}` explores with noise of a fixed size, but none is set",
            "write `actor.model.options: {exploration_noise: 0.1}`",
        )
    norm: Path = ("algorithm", "off_policy", "critic_norm")
    if loss == IMPLICIT_LOSS and config.algorithm.off_policy.critic_norm == "batch":
        message = f"`loss_type: {IMPLICIT_LOSS}` has target networks, and `critic_norm: batch` has none"
        report(blame(config, norm, _LOSS), "conflicting-settings", message, "write `critic_norm: layer` or `none`")
    if loss == "sac" and noise is not None:
        message = "`loss_type: sac` learns how much to explore; `exploration_noise` would fix it"
        report(at, "conflicting-settings", message, "remove it, or write `loss_type: td3`", about=[_LOSS])
