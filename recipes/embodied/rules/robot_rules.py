"""Rules of robots and the people beside them: cameras, interventions and judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, cast

from recipes.embodied.config.algorithm_config import is_off_policy
from recipes.embodied.config.camera_config import CAMERA_SOURCES, RobotEnvOptions
from recipes.embodied.config.env_types import ENV_TYPES, is_robot
from recipes.embodied.config.intervention_types import ENVIRONMENT, JUDGES, NONE, SOURCES, drives_one
from recipes.sections.checks import Report, blame
from recipes.sections.imports import check_import, runs_in_this_interpreter
from rlinf_core import RobotUnit
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, missing_modules

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedConfig, PolicyJob
    from recipes.embodied.config.env_config import EnvironmentConfig

_AT: Final[Path] = ("env", "train", "intervention")
_SOURCE: Final[Path] = (*_AT, "source")


def check_intervention(config: EmbodiedConfig, workers: int | None, report: Report) -> None:
    """Report a source that cannot take over in this job, and options that it does not take."""
    intervention, loss = config.env.train.intervention, config.algorithm.loss_type
    source = intervention.source
    if source == NONE:
        return
    if not is_off_policy(loss):
        report(
            _SOURCE,
            "conflicting-settings",
            f"`loss_type: {loss}` learns only from actions that its own policy chose",
            "write `algorithm.loss_type: sac`; or record corrections of a trained policy with `rlinf record RUN"
            f" --device {source}`, and learn from them with recipe `sft`",
            about=[("algorithm", "loss_type")],
        )
    if ":" in source:
        check_import(config, _SOURCE, source, "env", report, is_class=True)
        return
    total, stages = config.env.train.total_num_envs, config.rollout.pipeline_stage_num
    if drives_one(source) and workers is not None and (total != workers or stages != 1):
        report(
            blame(config, ("env", "train", "total_num_envs"), _SOURCE),
            "conflicting-settings",
            f"a person controls one environment, but `env` has {workers} worker{'s' if workers > 1 else ''} with"
            f" {total} environments in {stages} pipeline stage{'s' if stages > 1 else ''}",
            f"write `total_num_envs: {workers}` and `pipeline_stage_num: 1`",
            about=[_SOURCE],
        )
    _check_package(config, report)


def _check_package(config: EmbodiedConfig, report: Report) -> None:
    source = config.env.train.intervention.source
    known = SOURCES[source]
    if runs_in_this_interpreter(config, "env") and missing_modules(known.modules):
        report(
            _SOURCE,
            "missing-extra",
            f"`source: {source}` needs the package `{known.install}`, {absence(known.modules[0])}",
            f"run `pip install {known.install}`, or run `env` in an interpreter that has it",
        )


def check_judge(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report) -> None:
    """Report a judge that cannot judge these environments, and options that it does not take."""
    judge, at = environments.judge, ("env", section, "judge")
    if judge.source == ENVIRONMENT:
        return
    if ":" in judge.source:
        check_import(config, (*at, "source"), judge.source, "env", report, is_class=True)
        return
    missing = missing_modules(JUDGES[judge.source].modules) if runs_in_this_interpreter(config, "env") else ()
    if missing:
        message = f"`judge: {judge.source}` needs the package `{missing[0]}`, {absence(missing[0])}"
        report((*at, "source"), "missing-extra", message, f"give the nodes of `env` an interpreter with {missing[0]}")
    if judge.source == "keys" and environments.total_num_envs != 1 and not is_robot(environments.env_type):
        report(
            blame(config, ("env", section, "total_num_envs"), ("env", "train", "total_num_envs"), (*at, "source")),
            "conflicting-settings",
            f"a person judges one environment per worker, but `total_num_envs` is {environments.total_num_envs}",
            "write `total_num_envs: 1`",
            about=[(*at, "source")],
        )


def robot_options(environments: EnvironmentConfig) -> RobotEnvOptions | None:
    """Return the options of a robot's environments; None if the environments move no robot."""
    kind = environments.env_type
    if not is_robot(kind):
        return None
    model = cast("type[RobotEnvOptions]", ENV_TYPES[kind].options)
    return model.model_validate(environments.options)


def check_cameras(config: PolicyJob, section: str, environments: EnvironmentConfig, report: Report) -> None:
    """Report cameras that cannot be opened on the robots of `env`."""
    options = robot_options(environments)
    if options is None:
        return
    at: Path = ("env", section, "options", "cameras")
    training = robot_options(config.env.train)
    if section == "eval" and training is not None and training != options:
        report(
            at,
            "conflicting-settings",
            "training and evaluation have different cameras, but one robot",
            "write `cameras` in `env.train.options` alone",
            about=[("env", "train", "options", "cameras")],
        )
    for name, camera in options.cameras.items():
        if camera.source is not None and ":" in camera.source:
            check_import(config, (*at, name, "source"), camera.source, "env", report, is_class=True)
        if camera.source == "scene" and environments.env_type != "franka_robot":
            message = f"camera `{name}`: `source: scene` shows a Franka arm"
            report((*at, name, "source"), "conflicting-settings", message, "name another source")
    if not options.cameras:
        return
    robots = list(robots_of(config))
    _check_packages(config, at, options, sorted({_type_of(robot) for _, robot in robots}), report)
    for place, robot in robots:
        _check_serials(at, options, place, robot, report)


def robots_of(config: PolicyJob) -> Iterator[tuple[Path, RobotUnit]]:
    """Yield the robots of the groups that `env` is placed on."""
    place = config.cluster.component_placement.get("env")
    labels = () if place is None else place.node_group or ()
    for index, group in enumerate(config.cluster.node_groups):
        units = group.hardware.configs if group.hardware and group.label in labels else ()
        for number, unit in enumerate(units):
            yield ("cluster", "node_groups", index, "hardware", "configs", number), unit


def _type_of(robot: RobotUnit) -> str:
    return str(getattr(robot, "camera_type", "realsense"))


def _check_packages(config: PolicyJob, at: Path, options: RobotEnvOptions, types: list[str], report: Report) -> None:
    if not runs_in_this_interpreter(config, "env"):
        return
    for name, camera in options.cameras.items():
        for kind in types if camera.source is None else ("",):
            lacking = next(((mod, pip) for mod, pip in camera.modules(kind) if missing_modules([mod])), None)
            if lacking is not None:
                report(
                    (*at, name),
                    "missing-extra",
                    f"camera `{name}` needs the package `{lacking[0]}`, {absence(lacking[0])}",
                    f"run `pip install '{lacking[1]}'`, or run `env` in an interpreter that has it",
                )
                return


def _check_serials(at: Path, options: RobotEnvOptions, place: Path, robot: RobotUnit, report: Report) -> None:
    """Report cameras without a serial number or a driver, and serial numbers without a camera."""
    written: tuple[str, ...] = getattr(robot, "camera_serials", ())
    serials = options.serials(written)
    for name, camera in options.cameras.items():
        source = camera.source_on(_type_of(robot))
        if source not in CAMERA_SOURCES and ":" not in source:
            report(
                (*at, name),
                "conflicting-settings",
                f"there is no driver for cameras of `camera_type: {source}`",
                "name your subclass of `CameraDriver`: `source: package.module:Class`",
                about=[(*place, "camera_type")],
            )
            return
        if camera.takes_serial and serials[name] is None:
            report(
                (*at, name),
                "conflicting-settings",
                f"camera `{name}` has no serial number: the robot of node {robot.node_rank} has {len(written)}"
                " `camera_serials`",
                "add its serial number to `camera_serials`, which cameras take in order",
                about=[(*place, "camera_serials")],
            )
            return
    unused = [serial for serial in written if serial not in serials.values()]
    if unused:
        report(
            (*place, "camera_serials"),
            "conflicting-settings",
            f"no camera of `env.train.options.cameras` takes the serial number {unused[0]}",
            "add a camera, or remove the number",
            about=[at],
            severity=Severity.WARNING,
        )
