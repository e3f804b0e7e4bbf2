"""Rules of `loss_type: sac` and `td3`: their requirements and limits."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final

from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.model_options import DETERMINISTIC_SCHEDULER, NOISE_LEROBOT
from recipes.embodied.config.off_policy_config import (
    DEFAULT_BATCH,
    DETERMINISTIC_LOSSES,
    IMPLICIT_LOSS,
    NOISE_LOSS,
    RECORDED_LOSSES,
)
from recipes.embodied.models.folder_facts import (
    SETTINGS,
    STEERED,
    frozen_section,
    lerobot_type,
    observed_steps,
    read_object,
)
from recipes.sections.checks import Report, WorldSizes, blame
from rlinf_core import ConfigError
from rlinf_core.config.tree import Path

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig, EmbodiedModelConfig

SQUASHED: Final = "squashed_policy"
# By flow matching or diffusion, whose noise can be chosen.
_STEERABLE: Final = ("flow_policy", "pi0", "pi05", "smolvla", "lerobot")
# Those that read an instruction.
_READERS: Final = ("pi0", "pi05", "smolvla")
_FOLDER: Final[Path] = ("actor", "model", "model_path")
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
    if loss == NOISE_LOSS:
        _check_steered(config, report)
        return
    kind: Path = ("actor", "model", "model_type")
    if model.model_type != SQUASHED:
        report(
            blame(config, kind, _LOSS),
            "conflicting-settings",
            f"`loss_type: {loss}` trains a `{SQUASHED}`, but `model_type` is `{model.model_type}`",
            f"write `actor.model.model_type: {SQUASHED}`",
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


def _check_steered(config: EmbodiedConfig, report: Report) -> None:
    """Require a policy whose noise can be chosen, and steps of which the noise is known."""
    model = config.actor.model
    if model.model_type != STEERED:
        report(
            blame(config, ("actor", "model", "model_type"), _LOSS),
            "conflicting-settings",
            f"`loss_type: {NOISE_LOSS}` chooses the noise of a frozen policy, as `{STEERED}` does, but `model_type` is"
            f" `{model.model_type}`",
            f"write `actor.model.model_type: {STEERED}`, and the folder of the frozen policy as `model_path`",
        )
        return
    for path, is_set, what in (
        (("data", "train_data_paths"), bool(config.data.train_data_paths), "demonstrations"),
        (("env", "train", "intervention", "source"), config.env.train.intervention.source != NONE, "interventions"),
    ):
        if is_set:
            report(
                path,
                "conflicting-settings",
                f"`loss_type: {NOISE_LOSS}` learns from noise, which is not known of {what}",
                "remove it; recipe `sft` trains the frozen policy by demonstrations before",
                about=[_LOSS],
            )
    try:
        frozen = frozen_section(model)
    except ConfigError as error:
        report(_FOLDER, "missing-key" if model.model_path is None else "bad-value", error.message, error.help or "")
        return
    # A folder that says nothing is on another machine, or `folder_facts` reports it.
    said = "model_type" in frozen.model_fields_set
    if said and frozen.model_type not in _STEERABLE and ":" not in frozen.model_type:
        report(
            _FOLDER,
            "conflicting-settings",
            f"`loss_type: {NOISE_LOSS}` needs a policy that begins with noise, and the `{frozen.model_type}` in"
            f" `{frozen.model_path}` does not",
            f"name one of {', '.join(f'`{name}`' for name in _STEERABLE)}; if the folder is of another library, write"
            " its `options: {policy: {model_type: ...}}`",
            about=[_LOSS, ("actor", "model", "options", "policy")],
        )
    if frozen.model_type == "lerobot":
        _check_sampler(frozen, report)
    aliasing: Path = ("algorithm", "off_policy", "noise_aliasing")
    if config.algorithm.off_policy.noise_aliasing and (frozen.model_type in _READERS or observed_steps(frozen) > 1):
        report(
            aliasing,
            "conflicting-settings",
            "`noise_aliasing` runs the frozen policy on observations of the replay buffer, which has no instructions"
            " and none of earlier steps",
            "remove it",
            about=[_FOLDER],
        )


def _check_sampler(frozen: EmbodiedModelConfig, report: Report) -> None:
    """Report a policy of lerobot whose actions are no function of the noise that they begin with."""
    kind, key = lerobot_type(frozen), "noise_scheduler_type"
    written: dict[str, Any] = frozen.options.get("config") or {}
    settings = {**read_object(FilePath(str(frozen.model_path)) / SETTINGS), **written}
    if kind is None or (kind in NOISE_LEROBOT and settings.get(key) == DETERMINISTIC_SCHEDULER):
        return
    if kind in NOISE_LEROBOT:
        message = f"its sampler, `{settings.get(key)}`, draws more noise at each step"
        remedy = f"write `options: {{policy: {{options: {{config: {{{key}: {DETERMINISTIC_SCHEDULER}}}}}}}}}`"
    else:
        message, remedy = "its actions do not come from noise alone", "use lerobot's `diffusion`, or `flow_policy`"
    report(_FOLDER, "conflicting-settings", f"lerobot's `{kind}` cannot be steered: {message}", remedy, about=[_LOSS])
