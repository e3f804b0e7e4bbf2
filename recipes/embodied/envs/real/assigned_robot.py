"""The robot that an environment moves: the one that its process owns."""

from __future__ import annotations

from typing import TypeVar

from recipes.embodied.envs.env_spec import EnvSettings
from rlinf_core import ConfigError

RobotT = TypeVar("RobotT")


def own_robot(settings: EnvSettings, kind: type[RobotT], *, env_type: str, hardware: str, noun: str) -> RobotT:
    """Return the one robot of this process.

    Args:
        settings: of the environment.
        kind: the class of its hardware.
        env_type: as the file names the environment.
        hardware: a type of hardware that serves, for the error.
        noun: what the robot is called, `arm` or `robot`.

    Raises:
        ConfigError: there is none or several, or it has several environments to serve.
    """
    found = [unit for unit in settings.hardware if isinstance(unit, kind)]
    if len(found) != 1:
        raise ConfigError(
            f"`env_type: {env_type}` moves one {noun}, and this process owns {len(found) or 'none'}",
            help=f"place `env` on a node group with `hardware: {{type: {hardware}}}`, one process for each {noun}",
        )
    if settings.num_envs != 1:
        raise ConfigError(
            f"`env_type: {env_type}` has one environment on each {noun}, not {settings.num_envs}",
            help=f"make `total_num_envs` the number of {noun}s, and `pipeline_stage_num` 1",
        )
    return found[0]
