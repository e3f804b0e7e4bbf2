"""Environments by `env_type`. A kind is imported when it is asked for, and says what to install where that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.embodied.env_kinds import MODULES, NO_ADAPTER, no_adapter
from rlinf_core.errors import ConfigError
from rlinf_core.registry import Registry
from rlinf_core.requirements import install_command, missing_modules

if TYPE_CHECKING:
    from recipes.embodied.envs.base import EnvSettings, VectorEnv

_FOLDER = "recipes.embodied.envs"
_ENVS: Registry[type[VectorEnv]] = Registry(
    "env_type",
    {
        "franka_kin": f"{_FOLDER}.franka_kin:FrankaKinEnv",
        "franka_mujoco": f"{_FOLDER}.franka_mujoco:FrankaMujocoEnv",
        "franka_robot": f"{_FOLDER}.franka_robot:FrankaRobotEnv",
        "gymnasium": f"{_FOLDER}.gymnasium_env:GymnasiumEnv",
        "panda_gym": f"{_FOLDER}.panda_gym_env:PandaGymEnv",
    },
)
register_env = _ENVS.register


class MissingPackageError(ConfigError):
    """A kind of environment needs a package that this interpreter does not have.

    Attributes:
        package: the module that is missing.
    """

    def __init__(self, env_type: str, package: str) -> None:
        super().__init__(
            f"`env_type: {env_type}` needs the package `{package}`, which this Python does not have",
            help=f"run `{install_command(package)}`",
        )
        self.package = package


def make_env(env_type: str, settings: EnvSettings) -> VectorEnv:
    """Return a batch of environments.

    Args:
        env_type: a kind of ours, a registered one, or `package.module:Class` of your own.

    Raises:
        MissingPackageError: the kind's package is not installed.
        ConfigError: there is no such kind, or it does not have the task.
    """
    if env_type in NO_ADAPTER:
        message, help = no_adapter(env_type)
        raise ConfigError(message, help=help)
    check_package(env_type)
    return _ENVS.get(env_type)(settings)


def check_package(env_type: str) -> None:
    """Check that the package of a kind can be imported, without importing it.

    Raises:
        MissingPackageError: it cannot.
    """
    module = MODULES.get(env_type)
    if module is not None and missing_modules([module]):
        raise MissingPackageError(env_type, module)
