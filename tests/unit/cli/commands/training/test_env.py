"""`rlinf env`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.cli.typed import Cli

# Run by the interpreter of the tests: the check itself, of another simulator than LIBERO.
STAND_IN = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[5])!r})
from recipes.embodied.envs import registry
from recipes.embodied.envs.processes import simulator
from tests.unit.recipes.embodied.envs.fake_simulators import FakeEnv
registry.env_class = lambda name: FakeEnv
simulator.options_of = lambda kind, written: kind.options_model()
sys.argv = sys.argv[3:]
print("a line of the simulator's own")
runpy.run_module("recipes.embodied.interpreters.start_check", run_name="__main__")
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """The folder of an interpreter whose LIBERO is a stand-in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run.py").write_text(STAND_IN)
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/run.py "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_each_simulator_is_listed_with_its_interpreter(cli: Cli) -> None:
    text = cli("env", "list")
    data = json.loads(cli("env", "list", "--json").out)
    assert (text.code, data["schema"]) == (0, "rlinf.env-list/1")
    assert {"libero", "metaworld", "robosuite"} <= {simulator["env_type"] for simulator in data["simulators"]}
    for item in data["simulators"]:
        assert f"{item['env_type']}  " in text.out
        assert item["what"] in text.out


def test_an_unknown_simulator_is_refused_before_anything_is_made(cli: Cli) -> None:
    ended = cli("env", "setup", "metawrold")
    assert ended.code != 0
    assert "metaworld" in ended.err
    assert "Traceback" not in ended.err


def test_each_task_is_tried_at_starts_spread_over_its_list(interpreter: Path, cli: Cli) -> None:
    out = cli.out("env", "check", "libero", "many", "--starts", "2", "--path", str(interpreter), "--json")
    tasks = json.loads(out)["tasks"]
    assert [(task["set"], task["task"], task["starts"], task["faults"]) for task in tasks] == [
        ("many", name, [0, 2], []) for name in ("one", "two", "three")
    ]


def test_a_start_that_does_not_hold_is_named_and_exits_with_1(interpreter: Path, cli: Cli) -> None:
    out = cli.printed(1, "env", "check", "libero", "one", "two", "--starts", "4", "--path", str(interpreter))
    assert [line.split()[:4] for line in out.splitlines()[-4:-2]] == [
        ["one", "1", "4", "4"],
        ["two", "1", "4", "2"],
    ]
    assert out.splitlines()[-2:] == [f"two, start {n}: `cup on plate` does not hold" for n in (1, 3)]


@pytest.mark.parametrize("env_type", ["metaworld", "gymnasium", "franka_kin", "my_lab.envs:Own"])
def test_a_simulator_that_draws_its_starts_has_none_to_check(env_type: str, cli: Cli) -> None:
    err = cli.fails(2, "env", "check", env_type)
    assert f"`{env_type}` has no stored starts to check" in err
    assert "starts are stored for `libero`" in err


def test_an_interpreter_without_the_simulator_is_an_error(tmp_path: Path, cli: Cli) -> None:
    assert "rlinf venv setup libero" in cli("env", "check", "libero", "--path", str(tmp_path)).err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/false")
    assert "it printed nothing" in cli("env", "check", "libero", "--path", str(tmp_path)).err
