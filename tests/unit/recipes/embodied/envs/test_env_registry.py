"""Environments by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.config.camera_config import CAMERA_SOURCES
from recipes.embodied.config.env_types import ENV_TYPES, how_to_install
from recipes.embodied.config.intervention_types import JUDGES, SOURCES
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv
from recipes.embodied.envs.real.franka_robot import SPEC
from recipes.embodied.envs.registry import MissingPackageError, make_env
from recipes.sections.imports import missing_module, missing_name
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.errors import ConfigError
from rlinf_core.process.requirements import install_command

SETTINGS = EnvSettings(num_envs=2)


def test_ours_and_a_users_own() -> None:
    for name in ("franka_kin", "recipes.embodied.envs.franka.franka_kin:FrankaKinEnv"):
        assert isinstance(make_env(name, SETTINGS), FrankaKinEnv)


@pytest.mark.parametrize("name", sorted(name for name, known in ENV_TYPES.items() if known.module))
def test_a_missing_package_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ENV_TYPES[name].module
    assert package is not None
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=package) as caught:
        make_env(name, SETTINGS)
    assert caught.value.package == package
    assert sys.executable in caught.value.message
    assert caught.value.help == (how_to_install(name) or f"run `{install_command(package)}`")


def test_a_simulator_has_an_interpreter_of_its_own() -> None:
    assert "`rlinf venv setup libero`" in (how_to_install("libero") or "")
    assert "`pip install mani_skill torch`" in (how_to_install("maniskill") or "")
    assert how_to_install("gymnasium") is None


def test_every_class_that_a_table_names_is_there() -> None:
    """Their packages may be missing here, so that they cannot be imported."""
    tables: tuple[Mapping[str, Any], ...] = (ENV_TYPES, SOURCES, JUDGES, CAMERA_SOURCES)
    rows = [row for table in tables for row in table.values()]
    targets = {target for row in rows for target in (row.target, getattr(row, "options", None)) if target}
    assert {target: missing_module(target) or missing_name(target) for target in targets} == dict.fromkeys(targets)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean `franka_kin`"):
        make_env("franka-kin", SETTINGS)


def test_an_env_worker_needs_no_torch() -> None:
    """The interpreter of a simulator has none."""
    code = "import sys; sys.modules['torch'] = None; import recipes.embodied.workers.env_worker"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", ["franka_kin", "franka_mujoco", "franka_robot"])
def test_environments_need_neither_torch_nor_ray(kind: str) -> None:
    """An interpreter of env workers may have a simulator and no torch."""
    code = (
        "import sys; from recipes.embodied.envs.registry import _ENVS, check_package, make_env\n"
        "from recipes.embodied.envs.base import EnvSettings\n"
        f"kind = {kind!r}\n"
        "try: check_package(kind)\n"
        "except Exception: sys.exit(0)\n"
        "_ENVS.get(kind) if kind == 'franka_robot' else make_env(kind, EnvSettings(num_envs=2)).reset()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_says_how_large_the_actions_of_an_arm_are() -> None:
    assert ENV_TYPES["franka_robot"].action_size == SPEC.action_size


OWN = """
import functools
from json import loads
Env = 3
class Ship:
    def step(self): ...
def make(): ...
@functools.cache
def wrapped(): ...
if Env:
    def chosen(): ...
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Ship", None),
        ("wrapped", None),
        ("chosen", None),
        ("loads", None),
        ("make", "`own_kinds:make` is a function, not a class"),
        ("Env", "is a value"),
        ("step", "own_kinds.py defines no `step`"),
    ],
)
def test_the_kind_of_an_own_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str | None
) -> None:
    (tmp_path / "own_kinds.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = (f"env.train.env_type=own_kinds:{name}", "env.train.max_episode_steps=9")
    lines = [finding.message for finding in load_with_lint("gymnasium_ppo", overrides, environ={}).diagnostics]
    messages = [line for line in lines if "own_kinds" in line]
    assert bool(messages) is (problem is not None), messages
    assert problem is None or all(problem in message for message in messages)
