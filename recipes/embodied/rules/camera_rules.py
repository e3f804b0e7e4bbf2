"""Rules of `options.cameras` of robots: packages, drivers, and the serial numbers of each robot's cameras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from recipes.embodied.config.camera_config import CAMERA_SOURCES, RobotEnvOptions
from recipes.embodied.config.env_types import ENV_TYPES, is_robot
from recipes.sections.checks import Report
from recipes.sections.imports import check_import, runs_in_this_interpreter
from rlinf_core import RobotUnit
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, missing_modules
from rlinf_core.registry import import_target

if TYPE_CHECKING:
    from recipes.embodied.config import PolicyJob
    from recipes.embodied.config.env_config import EnvironmentConfig


def robot_options(environments: EnvironmentConfig) -> RobotEnvOptions | None:
    """Return the options of a robot's environments; None if the environments move no robot."""
    kind = environments.env_type
    if not is_robot(kind):
        return None
    model = cast("type[RobotEnvOptions]", import_target(ENV_TYPES[kind].options or "", "options"))
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
