"""The file of recipe `sft`: that of recipe `embodied` with demonstrations; environments only evaluate."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from recipes.embodied.config import PolicyActorConfig, PolicyJob, PolicyRunnerConfig, facts
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.embodied_no_effect import SFT
from recipes.embodied.models.folder_facts import STEERED, check_model_folder
from recipes.embodied.rules.data_rules import check_data, check_load_path
from recipes.embodied.rules.env_rules import check_environments
from recipes.embodied.rules.policy_rules import check_ensemble, check_lerobot, check_model_options
from recipes.sections.checks import (
    Report,
    WorldSizes,
    check_sections,
    near_multiples,
    place_entry,
)
from recipes.sections.imports import check_import
from rlinf_core import Count, IgnoredKeys
from rlinf_core.config.sections.values import StepsOrNever

# The components that evaluate; either both or neither are placed.
EVALUATING: Final = ("rollout", "env")


class SftRunnerConfig(PolicyRunnerConfig):
    """Settings of the run."""

    max_steps: StepsOrNever = 100


class SftActorConfig(PolicyActorConfig):
    """The workers that train."""

    global_batch_size: Count | None = Field(default=256, description="Rows per optimizer step, over all ranks.")


class SftDataConfig(DemonstrationsConfig):
    """Demonstrations, and the learning target."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("only_interventions", "normalization"),
            lambda data, sizes: data.target == "success",
            "a success classifier reads the images of all steps",
            "remove it, or write `target: actions`",
            because=("target",),
        ),
    )

    target: Literal["actions", "success"] = Field(
        default="actions",
        description="actions: imitate a policy; success: classify whether an image shows the task solved, for"
        " `env.train.judge: {source: classifier}`.",
    )
    batches_per_step: Count = Field(default=20, description="Optimizer steps of one training step.")


class SftConfig(PolicyJob):
    """Configuration of the sft recipe."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = SFT

    data: SftDataConfig = Field(
        default_factory=SftDataConfig, description="Demonstrations: train_data_paths, target, normalization."
    )
    runner: SftRunnerConfig = Field(
        default_factory=SftRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: SftActorConfig = Field(
        default_factory=SftActorConfig, description="The model that learns, its optimizer and its sharding."
    )


def evaluates(config: SftConfig) -> bool:
    """Return whether evaluation workers are placed."""
    return all(name in config.cluster.component_placement for name in EVALUATING)


def check(config: SftConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_sections(config, config.runner, facts(config), ("actor",), report, optional=EVALUATING)
    placed = [name for name in EVALUATING if name in config.cluster.component_placement]
    if len(placed) == 1:
        entry = place_entry(config.cluster, *(name for name in EVALUATING if name not in placed))
        report(
            ("cluster", "component_placement"),
            "missing-component",
            f"evaluations need both rollout and env, but only `{placed[0]}` has a placement",
            f"add {entry}, or remove `{placed[0]}`",
        )
    check_model_options(config, report)
    acts = evaluates(config) and config.data.target == "actions"
    environments = config.env.eval if acts else None
    check_load_path(config, environments, report)
    check_model_folder(config, report)
    _check_policy(config, report)
    check_lerobot(config, report)
    check_ensemble(config, report)
    if not config.data.train_data_paths:
        report(
            ("data", "train_data_paths"),
            "missing-key",
            "recipe `sft` learns from demonstrations, but none are named",
            "name LeRobotDataset folders or HDF5 files; `rlinf record` creates them",
        )
    check_data(config, environments, report)
    _check_batches(config, world_sizes.get("actor") or 1, report)
    if ":" in config.actor.model.model_type:
        model_type = config.actor.model.model_type
        check_import(config, ("actor", "model", "model_type"), model_type, "actor", report, is_class=True)
    _check_target(config, report)
    if evaluates(config):
        check_environments(config, "eval", config.env.eval, world_sizes.get("env"), report)


def _check_policy(config: SftConfig, report: Report) -> None:
    if config.actor.model.model_type == STEERED:
        report.conflict(
            "actor.model.model_type",
            f"demonstrations train no `{STEERED}`: the noise that led to their actions is not known",
            "name the policy that it steers; `loss_type: dsrl` trains the noise afterwards",
        )


def _check_target(config: SftConfig, report: Report) -> None:
    """Check the requirements of a success classifier: a model of images with one output, and no environments."""
    if config.data.target != "success":
        return
    model = config.actor.model
    if model.model_type in ("mlp_policy", "squashed_policy", "flow_policy"):
        report.conflict(
            "actor.model.model_type data.target",
            "`data.target: success` needs an image policy with discrete outputs, but `model_type` is"
            f" `{model.model_type}`",
            "write `actor.model.model_type: cnn_policy`",
        )
    if model.num_action_chunks != 1:
        message = "a success classifier has one output per image: set `num_action_chunks` to 1"
        report.conflict("actor.model.num_action_chunks", message, "write 1")
    if evaluates(config):
        report.conflict(
            "data.target cluster.component_placement",
            "a success classifier does not act, but `rollout` and `env` have placements to evaluate it",
            "remove `rollout` and `env` from `component_placement`",
        )


def _check_batches(config: SftConfig, actors: int, report: Report) -> None:
    total, micro = config.actor.global_batch_size, config.actor.micro_batch_size
    unit = (micro or 1) * actors
    if total is not None and total % unit:
        report(
            ("actor", "global_batch_size"),
            "batch-not-divisible",
            f"`actor.global_batch_size` does not divide evenly: {total} / (micro_batch_size {micro or 1} x {actors}"
            f" ranks = {unit}) = {total / unit:g}",
            f"nearest valid `actor.global_batch_size`: {near_multiples(total, unit)}",
        )
