"""Whether a new Ray still has what rlinf uses of its private parts, and whether they are used in one place only."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from rlinf_core.cluster import ray_private
from rlinf_core.cluster.ray_private import PARTS, PrivatePart
from rlinf_core.node.node_facts import ray_environment
from rlinf_core.process.proc import MARK

ROOT = Path(ray_private.__file__).parents[2]
# What is run on a node in an interpreter of its own, which has no rlinf, is a text.
AS_TEXT = "rlinf_cli/cluster/node/questions.py"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.module)
def test_ray_has_it_still(part: PrivatePart) -> None:
    module = import_module(part.module)
    for name in part.names:
        result = module
        for word in name.split("."):
            assert hasattr(result, word), f"{part.module}.{name}: {part.reason}"
            result = getattr(result, word)


def test_a_job_config_keeps_its_list_of_folders() -> None:
    assert import_module("ray.job_config").JobConfig()._py_driver_sys_path == []


def test_ray_still_knows_the_variables_of_its_environment() -> None:
    # Of some of its variables Python sees no more than their names, which end with a zero.
    native = Path(import_module("ray._raylet").__file__ or "").read_bytes()
    log_monitor = import_module("ray._private.log_monitor")
    variables = ray_environment("owner", "folder", None).keys() - {MARK, "RAY_AUTH_MODE"}
    assert variables
    for name in variables:
        assert f"{name}\0".encode() in native or hasattr(log_monitor, name), name


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"\bray\._(?!_)|\b_raylet\b", {"rlinf_core/cluster/ray_private.py", AS_TEXT}),
        (r"^\s*(from|import) ray\b|import_module\(.ray\b", {"rlinf_core/cluster/ray_api.py", AS_TEXT}),
    ],
    ids=["private", "any"],
)
def test_one_place_touches_ray(pattern: str, allowed: set[str]) -> None:
    result: list[str] = []
    for package in ("rlinf_core", "rlinf_cli", "recipes"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            lines = file.read_text(encoding="utf-8").splitlines()
            used = [line for line in lines if "ray_module(" not in line and re.search(pattern, line)]
            if used and name not in allowed:
                result += [f"{name}: {line.strip()}" for line in used]
    assert result == []


def test_what_is_not_listed_is_refused() -> None:
    with pytest.raises(KeyError):
        ray_private.ray_module("ray._private.runtime_env")
