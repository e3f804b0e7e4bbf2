"""Rules of `env.train` and `env.eval`: tasks, packages, classes and robots that an environment needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.camera_config import RobotEnvOptions
from recipes.embodied.config.env_config import EnvironmentConfig, EvalEnvironmentConfig, VideoConfig
from recipes.embodied.config.env_types import (
    DRIVEN,
    ENV_TYPES,
    EnvType,
    SimulatorOptions,
    driver_of,
    has_ids,
    how_to_install,
    is_robot,
    is_simulator,
)
from recipes.embodied.envs.observation_keys import STATES, camera_of
from recipes.embodied.rules.robot_rules import check_cameras, check_judge, robots_of
from recipes.sections.checks import Report, blame
from recipes.sections.imports import check_import, missing_module, runs_in_this_interpreter
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.ranks import format_range
from rlinf_core.config.sections.cluster import RESERVED_LABELS, NodeGroup
from rlinf_core.config.tree import Path
from rlinf_core.placement.resolve import resolve
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.topology import ClusterTopology

if TYPE_CHECKING:
    from recipes.embodied.envs.env_spec import EnvSpec


class EnvFacts(NamedTuple):
    """Properties of an environment that other keys of a file must fit.

    Attributes:
        has_states: whether its observations have `states`; None: unknown.
        has_images: whether its observations have images; None: unknown.
        max_episode_steps: its own limit; None: unknown, or no limit.
        problem: why it cannot be made; None: it can.
        help: the remedy.
        spec: the spec of its observations and actions, with 0 for unknown sizes; None: unknown.
        control_hz: actions per second; None: unknown.
    """

    has_states: bool | None = None
    has_images: bool | None = None
    max_episode_steps: int | None = None
    problem: str | None = None
    help: str | None = None
    spec: EnvSpec | None = None
    control_hz: float | None = None


def env_facts(env_type: str, task: str, options: Mapping[str, Any]) -> EnvFacts:
    """Make an environment that is cheap to make, and return its facts."""
    return _made(env_type, task, json.dumps(dict(options), sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _made(env_type: str, task: str, options: str) -> EnvFacts:
    from recipes.embodied.envs.env_spec import EnvSettings
    from recipes.embodied.envs.registry import make_env
    from rlinf_core import ConfigError

    if task.rpartition(":")[0]:
        missing = missing_module(task)
        return EnvFacts(problem=None if missing is None else f"`{task}` cannot be made: {missing}")
    try:
        env = make_env(env_type, EnvSettings(num_envs=1, task=task, options=json.loads(options)))
    except ConfigError as error:
        return EnvFacts(problem=error.message, help=error.help)
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        return EnvFacts(problem=f"`{task}` cannot be made: {type(error).__name__}: {error}")
    try:
        spec = env.spec
        limit, rate = env.max_episode_steps, env.control_hz
        return EnvFacts(spec.state_size > 0, bool(spec.cameras), limit, spec=spec, control_hz=rate)
    finally:
        env.close()


def episode_limit(config: PolicyJob, environments: EnvironmentConfig) -> int | None:
    """Return the steps after which an episode is truncated; None if unknown here."""
    if environments.max_episode_steps is not None:
        return environments.max_episode_steps
    return facts_of(config, environments).max_episode_steps


def has_no_limit(config: PolicyJob, environments: EnvironmentConfig) -> bool:
    """Return whether only the task ends an episode, which is known once the environment was made."""
    facts = facts_of(config, environments)
    return environments.max_episode_steps is None and facts.spec is not None and facts.max_episode_steps is None


def facts_of(config: PolicyJob, environments: EnvironmentConfig) -> EnvFacts:
    """Return the facts about environments, unknown if their package or interpreter is elsewhere."""
    kind, task = environments.env_type, environments.task
    known = ENV_TYPES.get(kind)
    if is_robot(kind):
        return _robot_facts(ENV_TYPES[kind], cast("RobotEnvOptions", _options(environments)))
    if known is not None and known.observes is not None:
        has_images = any(camera_of(name) for name in known.observes)
        return EnvFacts(STATES in known.observes, has_images, known.max_episode_steps)
    if is_simulator(kind):
        return EnvFacts(True, bool(options_of_simulator(environments).cameras))
    here = not _missing_package(kind) and runs_in_this_interpreter(config, "env")
    return env_facts(kind, task, environments.options) if has_ids(kind) and task is not None and here else EnvFacts()


def _robot_facts(known: EnvType, options: RobotEnvOptions) -> EnvFacts:
    """Return the facts about a robot, whose driver may add states and cameras."""
    own = known.observes is None
    return EnvFacts(None if own else True, bool(options.cameras) or (None if own else False), known.max_episode_steps)


def sizes_of(config: PolicyJob, environments: EnvironmentConfig) -> EnvFacts:
    """Return the requirements on data and weights, `spec` and `control_hz`, as far as known here.

    An environment that needs no package of its own is created.
    """
    kind = environments.env_type
    known = ENV_TYPES.get(kind)
    if known is None:
        return EnvFacts()
    if is_robot(kind) or is_simulator(kind):
        return _sizes_unmade(known, _options(environments))
    task = environments.task or next(iter(known.tasks), None)
    if task is None or _missing_package(kind) or not runs_in_this_interpreter(config, "env"):
        return EnvFacts()
    return env_facts(kind, task, environments.options)


def _sizes_unmade(known: EnvType, options: SimulatorOptions | RobotEnvOptions) -> EnvFacts:
    from recipes.embodied.envs.env_spec import EnvSpec

    if isinstance(options, RobotEnvOptions):
        return EnvFacts(spec=EnvSpec(0, known.action_size, cameras=options.shapes), control_hz=known.control_hz)
    size = options.image_size
    cameras = {str(camera): (size, size, 3) for camera in options.cameras}
    rate: float | None = getattr(options, "control_freq", known.control_hz)
    return EnvFacts(spec=EnvSpec(options.state_size, known.action_size, cameras=cameras), control_hz=rate)


def check_environments(
    config: PolicyJob, section: str, environments: EnvironmentConfig, workers: int | None, report: Report
) -> None:
    """Report a missing task, package, adapter or robot of an environment type."""
    if isinstance(environments, EvalEnvironmentConfig):
        _check_video(config, environments.video_cfg, report)
    are_own = not _are_those_of_training(config, section, environments)
    if are_own:
        _check_kind(config, section, environments, report)
    check_judge(config, section, environments, report)
    if is_robot(environments.env_type):
        if _have_robots(config, section, environments, report if are_own else None):
            _check_robots(config, section, environments, workers, report)
        if are_own:
            check_cameras(config, section, environments, report)


def _are_those_of_training(config: PolicyJob, section: str, environments: EnvironmentConfig) -> bool:
    """Return whether a section leaves its environments to `env.train`, where what is wrong with them is reported."""
    is_left = not {"env_type", "task", "options"} & environments.model_fields_set
    return section == "eval" and is_left and getattr(config.env, "train", None) is not None


def _check_kind(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report) -> None:
    """Report a missing task, package or class of an environment type."""
    at: Path = ("env", section, "env_type")
    kind = environments.env_type
    _check_task(config, section, environments, report)
    here = runs_in_this_interpreter(config, "env")
    missing = _missing_package(kind)
    if missing and here:
        report(
            at,
            "missing-extra",
            f"`env_type: {kind}` needs the package `{missing}`, {absence(missing)}",
            how_to_install(kind) or f"run `{install_command(missing)}`, or run `env` in an interpreter that has it",
        )
    elif has_ids(kind) and environments.task is not None:
        _check_made(config, section, environments, report, here=here)
    elif ":" in kind:
        check_import(config, at, kind, "env", report, is_class=True)


def _check_video(config: PolicyJob, wanted: VideoConfig, report: Report) -> None:
    """Report videos that cannot be written: without the package, without evaluations, of a robot."""
    video: Path = ("env", "eval", "video_cfg", "save_video")
    if not wanted.save_video:
        return
    missing = missing_modules(["av"])
    if missing:
        message = f"videos need the package `{missing[0]}`, {absence(missing[0])}"
        report(video, "missing-extra", message, f"run `{install_command(missing[0])}`")
    if not config.runner.only_eval and config.runner.val_check_interval == -1:
        report(
            video,
            "conflicting-settings",
            "`save_video` records evaluations, but this run has none: `val_check_interval` is -1",
            "write `runner.val_check_interval: 10`, or remove `save_video`",
            about=[("runner", "val_check_interval")],
        )


def options_of_simulator(environments: EnvironmentConfig) -> SimulatorOptions:
    """Return the options of a simulator."""
    return cast("SimulatorOptions", _options(environments))


def _options(environments: EnvironmentConfig) -> SimulatorOptions | RobotEnvOptions:
    model = cast("type[SimulatorOptions | RobotEnvOptions]", ENV_TYPES[environments.env_type].options)
    return model.model_validate(environments.options)


def _check_made(
    config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report, *, here: bool
) -> None:
    """Report a task that the simulator does not know, or options that it does not take."""
    at = blame(config, ("env", section, "task"), ("env", section, "env_type"))
    if not here:
        message = f"`{environments.task}` cannot be checked here: `env` runs in another interpreter"
        report(at, "missing-extra", message, "the env workers check it when the run starts", severity=Severity.NOTE)
        return
    facts = env_facts(environments.env_type, environments.task or "", environments.options)
    if facts.problem is not None:
        report(at, "unknown-choice", facts.problem, facts.help)


def _missing_package(kind: str) -> str | None:
    """Return the module that an environment type needs and this Python lacks."""
    known = ENV_TYPES.get(kind)
    return known.module if known and known.module and missing_modules([known.module]) else None


def _check_task(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report) -> None:
    at: Path = ("env", section, "env_type")
    kind, task = environments.env_type, environments.task
    known = ENV_TYPES[kind].tasks if kind in ENV_TYPES else ()
    if known and task is not None and task not in known:
        from rlinf_core.suggest import did_you_mean

        report(
            blame(config, ("env", section, "task"), at),
            "unknown-choice",
            f"`env_type: {kind}` has no task `{task}`",
            did_you_mean(task, known) or "known: " + ", ".join(f"`{name}`" for name in known),
        )
    if has_ids(kind) and task is None:
        example = "CartPole-v1" if kind == "gymnasium" else "ID"
        report(
            at,
            "missing-task",
            f"`env_type: {kind}` needs a task",
            f"add `task: {example}` to `env.{section}`",
            about=[("env", section, "task")],
        )


def declares(group: NodeGroup, robot: str | None) -> bool:
    """Return whether a group has robots that an environment type can move: of that type, or with a `driver`."""
    if group.hardware is None:
        return False
    if robot != DRIVEN:
        return group.hardware.type == robot
    return any(driver_of(unit) is not None for unit in group.hardware.configs)


def _check_drivers(config: PolicyJob, report: Report) -> None:
    """Report drivers that cannot be imported, and robots without one."""
    for at, unit in robots_of(config):
        driver = driver_of(unit)
        if driver is not None:
            check_import(config, (*at, "driver"), driver, "env", report, is_class=True)
        else:
            message = f"`env_type: {DRIVEN.lower()}` needs a `driver`, but this robot has none"
            report(at, "conflicting-settings", message, "write `driver: package.module:Class`")


def _have_robots(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report | None) -> bool:
    """Return whether `env` is placed on robots of the environment's kind alone; report if not."""
    kind, robot = environments.env_type, ENV_TYPES[environments.env_type].robot
    place = config.cluster.component_placement.get("env")
    if place is None:
        return False  # reported as a missing component
    groups = {group.label: group for group in config.cluster.node_groups}
    labels = place.node_group or ("cluster",)
    if any(label not in groups and label not in RESERVED_LABELS for label in labels):
        return False  # reported as an unknown group
    without = [label for label in labels if label not in groups or not declares(groups[label], robot)]
    if without and report is not None:
        named = "a robot with a `driver`" if robot == DRIVEN else f"a {robot}"
        report(
            ("env", section, "env_type"),
            "conflicting-settings",
            f"`env_type: {kind}` needs {named}, but `env` is placed on `{without[0]}`, which declares none",
            f"place `env` on a node group with `hardware: {{type: {robot}, configs: [...]}}`",
        )
    return not without


def _check_robots(
    config: PolicyJob, section: str, environments: EnvironmentConfig, workers: int | None, report: Report
) -> None:
    """Report env workers that do not each have one robot and one environment on it."""
    kind, robot = environments.env_type, ENV_TYPES[environments.env_type].robot
    place, at = config.cluster.component_placement["env"], ("env", section, "env_type")
    blocks = resolve("env", place.rank_map, place.node_group, ClusterTopology.from_config(config.cluster)).blocks
    uneven = next((block for block in blocks if len(block.processes) != len(block.resources)), None)
    if uneven is not None:
        report.conflict(
            "cluster.component_placement.env",
            f"`env_type: {kind}` has one worker per {robot}, but `env` has {len(uneven.processes)} on"
            f" {len(uneven.resources)}",
            f"write `placement: {format_range(uneven.resources)}`, without a `:`",
        )
        return
    if robot == DRIVEN:
        _check_drivers(config, report)
    stages = config.rollout.pipeline_stage_num
    if stages != 1:
        report(
            blame(config, ("rollout", "pipeline_stage_num"), at),
            "conflicting-settings",
            f"`env_type: {kind}` has one environment per {robot}, but `rollout.pipeline_stage_num` is {stages}",
            "write `pipeline_stage_num: 1`",
        )
    elif workers is not None and environments.total_num_envs != workers:
        report(
            blame(config, ("env", section, "total_num_envs"), ("env", "train", "total_num_envs"), at),
            "conflicting-settings",
            f"`env_type: {kind}` has one environment per {robot}, but `env.{section}.total_num_envs` is"
            f" {environments.total_num_envs} and `env` has {workers} worker{'s' if workers > 1 else ''}",
            f"write `total_num_envs: {workers}`",
        )
