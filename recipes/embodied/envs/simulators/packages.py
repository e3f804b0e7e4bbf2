"""Import of simulator packages, with one error if they are missing."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from recipes.embodied.config.env_types import how_to_install
from rlinf_core import ConfigError


def imported(module: str, env_type: str) -> Any:
    """Return a module of a simulator's package.

    Raises:
        ConfigError: it cannot be imported; the error names package and interpreter, and how to get one that has it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise ConfigError(
            f"`env_type: {env_type}` needs the module `{module}`, which `{sys.executable}` cannot import",
            why=f"`{missing}` is missing" if isinstance(error, ModuleNotFoundError) else str(error),
            help=how_to_install(env_type),
        ) from error


def unknown_task(env_type: str, task: str, known: list[str]) -> ConfigError:
    """Return the error about an unknown task of a simulator."""
    from rlinf_core.suggest import did_you_mean

    listed = ", ".join(f"`{name}`" for name in known[:8]) + (", ..." if len(known) > 8 else "")
    return ConfigError(
        f"`env_type: {env_type}` has no task `{task}`",
        where="env.task",
        help=did_you_mean(task, known) or f"known: {listed}",
    )
