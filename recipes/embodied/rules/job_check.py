"""The rules between the values of a file of the embodied recipe."""

from __future__ import annotations

from recipes.embodied.config import COMPONENTS, EmbodiedConfig, comparing_setting, facts, group_size, resets_each_pass
from recipes.embodied.config.algorithm_config import (
    SQUASHED,
    OffPolicySettings,
    PolicyGradientConfig,
    trainer_of,
    warmup_steps,
)
from recipes.embodied.config.embodied_config import check_batches, evaluates
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.config.env_types import ENV_TYPES, is_robot
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.models.folder_facts import STEERED, check_model_folder
from recipes.embodied.rules.data_rules import check_data, check_load_path
from recipes.embodied.rules.env_rules import check_environments, declares, episode_limit, facts_of, has_no_limit
from recipes.embodied.rules.policy_rules import (
    check_ensemble,
    check_lerobot,
    check_model_options,
    check_off_policy,
    check_running_statistics,
)
from recipes.embodied.rules.robot_rules import check_intervention
from recipes.sections.algorithm import ADVANTAGES
from recipes.sections.checks import (
    Report,
    WorldSizes,
    blame,
    check_sections,
    is_given,
    near_multiples,
    share_accelerators,
)
from recipes.sections.imports import check_import, check_own_algorithm
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path, format_path


def check(config: EmbodiedConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_sections(config, config.runner, facts(config), COMPONENTS, report)
    _check_robots_used(config, report)
    check_model_options(config, report)
    check_load_path(config, config.env.train, report)
    check_model_folder(config, report)
    check_lerobot(config, report)
    check_ensemble(config, report)
    check_data(config, config.env.train, report)
    _check_offload(config, world_sizes, report)
    if isinstance(config.algorithm, OffPolicySettings):
        check_off_policy(config, world_sizes, report)
    else:
        check_batches(config, world_sizes.get("actor") or 1, report)
        _check_algorithm(config, config.algorithm, report)
    check_intervention(config, world_sizes.get("env"), report)
    _check_schedule(config, report)
    _check_passes(config, report)
    _check_steps(config, report)
    _check_imports(config, report)
    _check_limits(config, report)
    _check_elastic(config, report)
    for section in ("train", "eval") if evaluates(config) else ("train",):
        # Settings that an evaluation inherits are checked in training.
        own = section == "train" or is_given(config, ("env", section))
        environments: EnvironmentConfig = getattr(config.env, section)
        _check_shares(config, section, environments, world_sizes.get("env"), report)
        if own:
            check_environments(config, section, environments, world_sizes.get("env"), report)
            _check_observations(config, section, environments, report)


def _check_elastic(config: EmbodiedConfig, report: Report) -> None:
    """Refuse elastic environments that cannot move between workers: robots, and those with a person."""
    entry, train = config.cluster.component_placement.get("env"), config.env.train
    if entry is None or not entry.elastic:
        return
    robot = is_robot(train.env_type)
    if robot or train.intervention.source != NONE:
        report(
            ("cluster", "component_placement", "env"),
            "component-not-elastic",
            "component `env` cannot go on with fewer processes: "
            + ("each robot is driven by its own" if robot else "a person takes part in its episodes"),
            "remove `elastic` from it",
            about=[("env", "train", "env_type")],
        )


def _check_demonstrations(config: EmbodiedConfig, algorithm: PolicyGradientConfig, report: Report) -> None:
    """Require demonstrations if their loss has a weight."""
    if algorithm.bc_weight and not config.data.train_data_paths:
        report.conflict(
            "algorithm.bc_weight",
            "`bc_weight` weights demonstrations, but there are none",
            "write `data.train_data_paths`; `rlinf record` creates demonstrations",
            about="data.train_data_paths",
        )


def _check_algorithm(config: EmbodiedConfig, algorithm: PolicyGradientConfig, report: Report) -> None:
    has_values = config.actor.model.add_value_head
    check_own_algorithm(config, algorithm.adv_type, algorithm.loss_type, report)
    check_running_statistics(config, algorithm, report)
    _check_demonstrations(config, algorithm, report)
    _check_policy(config, algorithm, report)
    both = blame(config, ("algorithm", "loss_type"), ("algorithm", "adv_type"))
    if algorithm.adv_type == "gae" and algorithm.loss_type == "actor":
        report(
            both,
            "conflicting-settings",
            "`adv_type: gae` needs values, but `loss_type: actor` trains none",
            "write `loss_type: actor_critic`, or `adv_type: grpo`",
        )
    if algorithm.adv_type in ADVANTAGES and algorithm.adv_type != "gae" and algorithm.loss_type == "actor_critic":
        report(
            both,
            "conflicting-settings",
            f"`loss_type: actor_critic` trains values, but `adv_type: {algorithm.adv_type}` gives no returns to learn"
            " them from",
            "write `loss_type: actor`, or `adv_type: gae`",
        )
    for name, needs in (("adv_type", "gae"), ("loss_type", "actor_critic")):
        if getattr(algorithm, name) == needs and not has_values:
            report.conflict(
                "actor.model.add_value_head",
                f"`{name}: {needs}` needs values, but the model has no value head",
                "write `add_value_head: true`, or `adv_type: grpo` and `loss_type: actor`",
                about=f"algorithm.{name}",
            )
            break
    last, warmup = config.runner.last_step, warmup_steps(algorithm)
    if warmup and not has_values and algorithm.loss_type != "actor_critic":
        report.conflict(
            "algorithm.options.critic_warmup_steps",
            "`critic_warmup_steps` trains a value head, but the model has none",
            "remove it, or write `actor.model.add_value_head: true`",
            about="actor.model.add_value_head",
        )
    elif last is not None and warmup >= last and not config.runner.only_eval:
        report(
            ("algorithm", "options", "critic_warmup_steps"),
            "cannot-train",
            f"`critic_warmup_steps: {warmup}` lasts all {last} steps: the policy never learns",
            f"write less than {last}",
            about=[("runner", "max_steps"), ("runner", "max_epochs"), ("runner", "only_eval")],
        )
    _check_groups(config, report)


def _check_policy(config: EmbodiedConfig, algorithm: PolicyGradientConfig, report: Report) -> None:
    """Report policies that only off-policy algorithms train."""
    policy = config.actor.model.model_type
    needs_values = algorithm.adv_type == "gae" or algorithm.loss_type == "actor_critic"
    if policy == STEERED or (policy == SQUASHED and needs_values):
        report.conflict(
            "algorithm.loss_type actor.model.model_type",
            f"`loss_type: {algorithm.loss_type}` with `adv_type: {algorithm.adv_type}` cannot train a `{policy}`"
            + (", whose weights are frozen" if policy == STEERED else ", which estimates no values"),
            f"write `loss_type: {trainer_of(policy)}`, or another `model_type`",
        )


def _check_groups(config: EmbodiedConfig, report: Report) -> None:
    """Check that a method which compares the members of a group has several to compare."""
    size = group_size(config, config.env.train)
    size_at: Path = ("algorithm", "group_size")
    compares = comparing_setting(config)
    if compares is not None and size < 2:
        key = compares.partition(":")[0]
        report(
            blame(config, size_at, ("algorithm", key), ("algorithm", "options", key), ("algorithm", "loss_type")),
            "conflicting-settings",
            f"`{compares}` compares the members of a group, but every group has one",
            "write `algorithm.group_size: 8`",
        )


def _check_offload(config: EmbodiedConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Require shards for offloading them to the host's memory, and warn of offloading that frees memory for nobody."""
    fsdp, alone = config.actor.fsdp_config, world_sizes.get("actor") == 1
    if fsdp.cpu_offload and (alone or fsdp.sharding_strategy == "no_shard"):
        why = "a single actor" if alone else "`sharding_strategy: no_shard`"
        report.conflict(
            "actor.fsdp_config.cpu_offload",
            f"`cpu_offload` keeps shards in host memory, but {why} has none",
            "write `actor.enable_offload: true` instead: the actor leaves its accelerator while others use it",
            about="actor.fsdp_config.sharding_strategy",
        )

    sides = ("actor", "rollout")
    if config.runner.staleness and set(sides) <= set(config.cluster.component_placement):
        leaves = [name for name in sides if getattr(config, name).enable_offload]
        if leaves and share_accelerators(config, *sides):
            at = (leaves[0], "enable_offload")
            report(
                blame(config, at, ("runner", "max_staleness")),
                "conflicting-settings",
                "with `runner.max_staleness`, actor and rollout run at the same time; here they share accelerators,"
                " which must hold both: `enable_offload` makes no room",
                "give `rollout` its own accelerators, or write `runner.max_staleness: 0` to take turns",
                about=[("runner", "max_staleness")],
                severity=Severity.WARNING,
            )


def _check_schedule(config: EmbodiedConfig, report: Report) -> None:
    """Check that a falling learning rate has an end, after its warmup."""
    optim, at = config.actor.optim, ("actor", "optim")
    total = optim.total_training_steps or config.runner.last_step
    if optim.lr_scheduler != "constant" and total is None:
        report(
            (*at, "lr_scheduler"),
            "conflicting-settings",
            f"`lr_scheduler: {optim.lr_scheduler}` decays until the last step, but this run has no last step",
            "write `runner.max_steps` or `actor.optim.total_training_steps`",
            about=[(*at, "total_training_steps"), ("runner", "max_steps"), ("runner", "max_epochs")],
        )
    if total is not None and optim.lr_warmup_steps >= total:
        report(
            blame(config, (*at, "lr_warmup_steps"), (*at, "total_training_steps")),
            "conflicting-settings",
            f"`lr_warmup_steps: {optim.lr_warmup_steps}` does not end before the last of {total} steps",
            f"write less than {total}",
            about=[("runner", "max_steps"), ("runner", "max_epochs")],
        )


def _check_robots_used(config: EmbodiedConfig, report: Report) -> None:
    """Warn of robots in the placement of `env` that no environment uses."""
    kinds = {config.env.train.env_type, config.env.eval.env_type}
    place = config.cluster.component_placement.get("env")
    own = any(":" in kind for kind in kinds)
    if place is None or own:
        return  # a custom environment may use robots in any way
    for index, group in enumerate(config.cluster.node_groups):
        if group.hardware is None or group.label not in (place.node_group or ()):
            continue
        moved_by = [name for name, known in ENV_TYPES.items() if known.robot and declares(group, known.robot)]
        if kinds & set(moved_by):
            continue
        robot = next(iter(moved_by), None)
        kind = config.env.train.env_type
        report(
            ("cluster", "node_groups", index, "hardware"),
            "unused-robots",
            f"`env` is placed on the robots of `{group.label}`, but `env_type: {kind}` uses none",
            f"write `env.train.env_type: {robot}`, or place `env` on other nodes"
            if robot
            else "name your own environment as `env_type: package.module:Class`, or place `env` on other nodes",
            about=[("env", "train", "env_type"), ("env", "eval", "env_type")],
            severity=Severity.WARNING,
        )


def _check_shares(
    config: EmbodiedConfig, section: str, environments: EnvironmentConfig, world_size: int | None, report: Report
) -> None:
    """Require environments to divide evenly over workers and pipeline stages, in whole groups."""
    total, stages, workers = environments.total_num_envs, config.rollout.pipeline_stage_num, world_size or 1
    size, shares = group_size(config, environments), workers * stages
    name = f"env.{section}.total_num_envs"
    where = f"{workers} worker{'s' if workers > 1 else ''} x pipeline_stage_num {stages} = {shares}"
    sizes: tuple[Path, ...] = (
        ("env", section, "total_num_envs"),
        ("env", "train", "total_num_envs"),
        ("rollout", "pipeline_stage_num"),
        ("env",),
    )
    if total % shares:
        report(
            blame(config, *sizes),
            "envs-not-divisible",
            f"`{name}` does not divide evenly: {total} / ({where}) = {total / shares:g}",
            f"nearest valid `{name}`: {near_multiples(total, shares * size)}",
        )
    elif (total // shares) % size:
        report(
            blame(config, ("algorithm", "group_size"), *sizes),
            "groups-not-divisible",
            f"`{name}` does not split into groups: {total} / ({where}) = {total // shares} environments, /"
            f" group_size {size} = {total / shares / size:g}",
            f"nearest valid `{name}`: {near_multiples(total, shares * size)}",
        )


def _check_imports(config: EmbodiedConfig, report: Report) -> None:
    """Check that a custom model can be imported; environments are checked with their sections."""
    name = config.actor.model.model_type
    if ":" in name:
        check_import(config, ("actor", "model", "model_type"), name, "actor", report, is_class=True)


def _check_observations(config: EmbodiedConfig, section: str, environments: EnvironmentConfig, report: Report) -> None:
    """Check that the policy takes the environment's observations."""
    kind, facts = config.actor.model.model_type, facts_of(config, environments)
    needs = {"cnn_policy": ("images", facts.has_images), "mlp_policy": ("states", facts.has_states)}
    what, has = needs.get(kind, ("", None))
    if has is False:
        other = "mlp_policy" if kind == "cnn_policy" else "cnn_policy"
        where = environments.task if environments.task and ":" not in environments.env_type else environments.env_type
        report.conflict(
            f"actor.model.model_type env.{section}.task env.{section}.env_type",
            f"`{kind}` needs {what}, but `{where}` has none",
            f"write `model_type: {other}`",
        )


def _check_passes(config: EmbodiedConfig, report: Report) -> None:
    """Check that episodes fit into a rollout segment if each resets."""
    train = config.env.train
    if not resets_each_pass(config):
        return
    limit, steps = episode_limit(config, train), train.max_steps_per_rollout_epoch
    if limit is None or limit <= steps:
        return
    longer = f"write `max_steps_per_rollout_epoch: {limit}` or more"
    report.conflict(
        "env.train.max_episode_steps env.train.max_steps_per_rollout_epoch",
        f"an episode has up to {limit} steps, but a pass has {steps} and resets at its start: longer episodes would"
        " never reach their end",
        longer if train.max_episode_steps is None else f"{longer}, or `max_episode_steps: {steps}`",
    )


def _check_limits(config: EmbodiedConfig, report: Report) -> None:
    """Require a limit of episodes that run to their end: in evaluations, and if every rollout segment resets."""
    for section, what in (("eval", "evaluation"), ("train", "pass")):
        environments: EnvironmentConfig = getattr(config.env, section)
        runs_to_the_end = evaluates(config) if section == "eval" else resets_each_pass(config)
        if runs_to_the_end and has_no_limit(config, environments):
            report.conflict(
                f"env.{section}.task env.train.task",
                f"episodes of `{environments.task}` have no limit: no {what} could end them",
                "add `max_episode_steps: 1000`, or another number of steps, to `env.train`",
                about=f"env.{section}.max_episode_steps",
            )
            return


def _check_steps(config: EmbodiedConfig, report: Report) -> None:
    """Require whole action chunks in a rollout segment of training."""
    chunks, steps = config.actor.model.num_action_chunks, config.env.train.max_steps_per_rollout_epoch
    if steps % chunks and not config.runner.only_eval:
        name: Path = ("env", "train", "max_steps_per_rollout_epoch")
        report(
            blame(config, name, ("actor", "model", "num_action_chunks")),
            "envs-not-divisible",
            f"`{format_path(name)}` does not divide evenly: {steps} / num_action_chunks {chunks} = {steps / chunks:g}",
            f"nearest valid `{format_path(name)}`: {near_multiples(steps, chunks)}",
        )
