"""As many simulators at once as the env workers of a node hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.envs.processes import child
from recipes.embodied.envs.processes.child import egl_devices, render_on_own_accelerator
from recipes.embodied.interpreters.simulator_probe import look
from recipes.embodied.interpreters.simulators_at_once import ProbeRequest, simulators_at_once

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
