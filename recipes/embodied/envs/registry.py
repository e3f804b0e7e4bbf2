"""Constructors of environments by `env_type`, imported on demand."""

# Calls private methods of the environment, and makes one environment rest.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import cast

from recipes.embodied.config.env_types import ENV_TYPES, GYMNASIUM, ID_FORM, how_to_install
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.checks import EnvContractError as EnvContractError
from recipes.embodied.envs.env_spec import EnvSettings
from rlinf_core import ConfigError
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.registry import Registry
from rlinf_core.suggest import short_repr

_ENVS: Registry[type[VectorEnv]] = Registry(
    "env_type",
    {name: known.target for name, known in ENV_TYPES.items()},
    bases=("recipes.embodied.envs.base:VectorEnv", "gymnasium:Env"),
)
register_env = _ENVS.register


class MissingPackageError(ConfigError):
    """An environment type needs a package that this interpreter lacks or has in another version.

    Attributes:
        package: the missing module.
    """

    def __init__(self, env_type: str, package: str) -> None:
        super().__init__(
            f"`env_type: {env_type}` needs the package `{package}`, {absence(package)}: `{sys.executable}`",
            help=how_to_install(env_type) or f"run `{install_command(package)}`",
        )
        self.package = package


def make_env(env_type: str, settings: EnvSettings) -> VectorEnv:
    """Return a batch of environments.

    Args:
        env_type: a built-in or registered type, an id of Gymnasium, or a custom `package.module:Class`: a `VectorEnv`
            or a `gymnasium.Env`.
        settings: the settings of the batch.

    Raises:
        MissingPackageError: the type's package is not installed.
        ConfigError: there is no such type, it is not an environment, or it lacks the task.
    """
    if not isinstance(env_type, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        help = "write a class as text, as in `my_package:MyEnv`"
        raise ConfigError(f"`env_type` is {short_repr(env_type)}, expected text", help=help)
    if re.fullmatch(ID_FORM, env_type) and settings.task in (None, env_type):
        env_type, settings = GYMNASIUM, replace(settings, task=env_type)
    return env_class(env_type)(settings)


def env_class(env_type: str) -> type[VectorEnv]:
    """Return the class of an environment type.

    Raises: as `make_env`.
    """
    check_package(env_type)
    target = cast("object", _ENVS.get(env_type))
    gymnasium = sys.modules.get("gymnasium")  # loaded if any gymnasium class is
    if gymnasium is not None and isinstance(target, type) and issubclass(target, gymnasium.Env):
        from recipes.embodied.envs.simulators.gymnasium_env import env_of_class

        return env_of_class(env_type)
    return cast("type[VectorEnv]", target)


def check_package(env_type: str) -> None:
    """Check that an environment's package is installed, without importing it.

    Raises:
        MissingPackageError: the package is not installed.
    """
    known = ENV_TYPES.get(env_type)
    if known is not None and known.module is not None and missing_modules([known.module]):
        raise MissingPackageError(env_type, known.module)
