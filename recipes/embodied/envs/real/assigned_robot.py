"""Lookup of the robot that this process owns."""

from __future__ import annotations

from typing import TypeVar

from recipes.embodied.envs.env_spec import EnvSettings
from rlinf_core import ConfigError

RobotT = TypeVar("RobotT")


def own_robot(settings: EnvSettings, kind: type[RobotT], *, env_type: str, hardware: str, noun: str) -> RobotT:
    """Return the one robot of this process.

    Args:
        settings: the settings of the environment.
        kind: the class of its hardware.
        env_type: the environment type, as the file names the environment.
        hardware: a type of hardware that serves, for the error.
        noun: what the robot is called, `arm` or `robot`.

    Raises:
        ConfigError: there is none or several, or it has several environments to serve.
    """
    robots = [unit for unit in settings.hardware if isinstance(unit, kind)]
    if len(robots) != 1:
        raise ConfigError(
            f"`env_type: {env_type}` moves one {noun}, but this process owns {len(robots) or 'none'}",
            help=f"place `env` on a node group with `hardware: {{type: {hardware}}}`, one process for each {noun}",
        )
    if settings.num_envs != 1:
        raise ConfigError(
            f"`env_type: {env_type}` has one environment on each {noun}, not {settings.num_envs}",
            help=f"set `total_num_envs` to the number of {noun}s, and `pipeline_stage_num` to 1",
        )
    return robots[0]
