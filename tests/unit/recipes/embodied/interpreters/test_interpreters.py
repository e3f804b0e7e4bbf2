"""Interpreters for simulators: what is installed into them, and what is said where they do not do."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.envs.simulators.packages import DISTRIBUTIONS, LOCKS, versions_of
from recipes.embodied.interpreters import locked_venvs
from recipes.embodied.interpreters.locked_venvs import (
    Made,
    SetupError,
    lines_of,
    own_requirement,
    setup,
    simulators,
)
from recipes.embodied.interpreters.simulator_probe import look
from recipes.embodied.interpreters.simulators_at_once import ProbeRequest
from rlinf_core import ConfigError, load_job
from rlinf_core.job.find_recipe import find_recipe

FRAME = {"python": "3.11.7", "versions": {}, "states": 39, "actions": 4, "frame": [64, 64]}
DARK = {"python": "3.11.7", "versions": {}, "states": 39, "actions": 4, "frame_fault": {"message": "no EGL"}}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be run; the environment is made without them."""
    run: list[list[str]] = []

    def note(command: Any, emit: Any) -> None:
        run.append(list(command))
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin/python").touch()

    monkeypatch.setattr(locked_venvs, "_run", note)
    monkeypatch.setattr(locked_venvs, "probe", lambda *_: FRAME)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    return run


def test_every_simulator_has_a_lock_of_exact_versions() -> None:
    assert sorted(simulators()) == sorted(path.stem for path in LOCKS.glob("*.txt"))
    for name in simulators():
        first, *lines = (LOCKS / f"{name}.txt").read_text().splitlines()
        assert first.startswith("# ")
        pins = [line for line in lines if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^ ]+", line) for line in pins)
        names = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
        assert {*DISTRIBUTIONS[name], "mujoco", "numpy", "ray", "pydantic"} <= names
        assert not names & {"torch", "rlinf-cli"}


def test_versions_cover_the_packages_of_an_environment() -> None:
    assert versions_of("franka_mujoco") == {"mujoco": metadata.version("mujoco")}
    assert versions_of("gymnasium")["gymnasium"] == metadata.version("gymnasium")
    assert versions_of("franka_kin") == versions_of("my_lab.envs:Own") == {}


def test_the_lock_and_this_very_rlinf_are_installed(tmp_path: Path, commands: list[list[str]]) -> None:
    output: list[str] = []
    made = setup("metaworld", tmp_path / "mw", output.append)
    assert (made.python, made.renderer) == (tmp_path / "mw/bin/python", "egl")
    venv, packages, own = commands
    assert venv == [sys.executable, "-m", "venv", str(tmp_path / "mw")]
    assert packages[:4] == [str(made.python), "-m", "pip", "install"]
    assert str(LOCKS / "metaworld.txt") in packages
    assert own[-len(own_requirement()) :] == own_requirement()
    assert "--no-deps" in own
    # Once more brings it up to date, without making it again.
    setup("metaworld", tmp_path / "mw", output.append)
    assert [len(commands), commands[3][-1]] == [5, packages[-1]]


def test_the_lines_are_those_of_a_valid_file(tmp_path: Path) -> None:
    python = tmp_path / "a folder" / "bin/python"
    lines = lines_of(Made("metaworld", python, FRAME, "egl"))
    file = tmp_path / "job.yaml"
    file.write_text(
        "recipe: embodied\n"
        + lines.replace("cluster:\n", "cluster:\n  num_nodes: 1\n").replace(
            "component_placement:\n", "component_placement:\n    actor,rollout: {node_group: node, placement: 0}\n"
        )
    )
    config: Any = load_job(file).config
    (own,) = config.cluster.node_groups[0].env_configs
    assert own.python_interpreter_path == str(python)
    assert config.env.train.env_type == "metaworld"


def test_other_folders_are_left_alone(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="was not created by `rlinf venv setup`"):
        setup("metaworld", tmp_path, print)
    setup("metaworld", tmp_path / "mw", print)
    with pytest.raises(SetupError, match="was made for `metaworld`"):
        setup("libero", tmp_path / "mw", print)
    with pytest.raises(ConfigError, match="metawrold") as caught:
        setup("metawrold", tmp_path / "mw", print)
    assert caught.value.help == "did you mean `metaworld`?"
    assert len(commands) == 3


def test_the_first_renderer_that_works_is_taken(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by(works: tuple[str, ...]) -> None:
        monkeypatch.setattr(locked_venvs, "probe", lambda *args: FRAME if args[2]["MUJOCO_GL"] in works else DARK)

    by(("osmesa",))
    assert setup("metaworld", tmp_path / "mw", print).renderer == "osmesa"
    by(())
    made = setup("metaworld", tmp_path / "mw", print)
    assert made.renderer is None
    assert "MUJOCO_GL" not in lines_of(made)
    fault = {"fault": {"message": "no mesh", "why": "the assets are missing", "help": "install them"}}
    monkeypatch.setattr(locked_venvs, "probe", lambda *_: fault)
    with pytest.raises(SetupError, match="no mesh") as caught:
        setup("metaworld", tmp_path / "mw", print)
    assert caught.value.why == "the assets are missing"


def test_an_interpreter_that_is_none_is_told(tmp_path: Path) -> None:
    probed = locked_venvs.probe("metaworld", tmp_path / "no/python", {})
    assert probed["fault"]["why"] == "No such file or directory"
    probed = locked_venvs.probe("metaworld", Path("/bin/false"), {})
    assert probed["fault"]["why"] == "exit code 1"


def test_a_simulator_that_is_not_here_is_a_fault_with_a_remedy() -> None:
    try:
        import metaworld  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        pytest.skip("this interpreter has Meta-World")
    loaded = json.loads(json.dumps(look("metaworld")))
    assert "`metaworld`" in loaded["fault"]["message"]
    assert "rlinf venv setup metaworld" in loaded["fault"]["help"]
    assert "states" not in loaded
    assert (loaded["verdict"], loaded["help"]) == ("fault", loaded["fault"]["help"])


def test_doctor_tries_the_simulators_of_a_file() -> None:
    def tried(env: str) -> list[Any]:
        text = "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n"
        text += "    actor,rollout: {node_group: node, placement: 0}\n    env: {node_group: sim, placement: 0}\n"
        text += "  node_groups:\n    - label: sim\n      node_ranks: 0\n      env_configs:\n"
        text += "        - {node_ranks: 0, python_interpreter_path: /opt/venv/bin/python}\n"
        job = load_job("-", stdin=f"{text}env: {env}\n".encode())
        trials = (recipe := find_recipe("embodied")).load(recipe.trials)
        assert trials is not None
        return trials(job.config)

    assert tried("{train: {env_type: franka_kin}}") == []
    (states,) = tried("{train: {env_type: metaworld}}")
    assert states[:3] == ("env", "simulator", "recipes.embodied.interpreters.simulator_probe")
    assert states.each_process
    kind, request = states.arguments
    assert (kind, json.loads(request)["frame"]) == ("metaworld", False)
    both = [
        (item.arguments[0], ProbeRequest(**json.loads(item.arguments[1])))
        for item in tried(
            "{train: {env_type: libero, task: libero_goal, total_num_envs: 8, num_processes: 4},"
            " eval: {env_type: metaworld, task: null, options: {}, total_num_envs: 6}}"
        )
    ]
    assert [(kind, request.frame, request.batches) for kind, request in both] == [
        ("libero", True, [[8, 4]]),
        ("metaworld", False, [[6, 4]]),
    ]
    assert both[0][1].task == "libero_goal"
