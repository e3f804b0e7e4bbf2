"""Simulators in processes of their own do as those in this one; their ends are told by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.contract import check_env, random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.env_state import pack, unpack
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.envs.repeating import SimulatorError, known_fault
from rlinf_core import ConfigError
from tests.known import known
from tests.unit.recipes.embodied.envs.fake_simulators import FakeEnv, FakeSimulation
from tests.waiting import until


def made(processes: int = 2, *, num_envs: int = 3, task: str | None = None, **options: Any) -> FakeEnv:
    settings = EnvSettings(
        num_envs=num_envs,
        task=task,
        options=options,
        num_processes=processes,
        simulator_timeout=1.0,
        owner="EnvGroup:0",
        resumable=True,
    )
    return FakeEnv(settings)


def moved(env: FakeEnv) -> None:
    env.reset()
    for _ in range(3):
        env.step(np.zeros((3, 1, 2), np.float32))


@pytest.fixture
def closed() -> Any:
    kept: list[FakeEnv] = []
    yield lambda env: kept.append(env) or env
    for env in kept:
        env.close()


def test_promises_are_kept_in_this_process_and_in_others() -> None:
    check_env(lambda settings: FakeEnv(settings))
    check_env(FakeEnv, options={})


def test_processes_do_as_one_process_does(closed: Any) -> None:
    envs = [closed(made(processes)) for processes in (0, 1, 2)]
    assert [env.spec for env in envs] == [envs[0].spec] * 3
    seen = [env.reset() for env in envs]
    for step in range(8):
        for other in seen[1:]:
            assert other.keys() == seen[0].keys()
            for name, array in other.items():
                assert array.dtype == seen[0][name].dtype
                assert (array == seen[0][name]).all()
        actions = random_actions(envs[0].spec, 3, chunk=2, seed=step)
        results = [env.step(actions) for env in envs]
        for other in results[1:]:
            assert (other.rewards == results[0].rewards).all()
            assert (other.dones == results[0].dones).all()
        seen = [result.observations for result in results]
    assert envs[0].knows_success


def commands_of(env: FakeEnv) -> list[str]:
    """Return a list of the commands that the first simulator process will be sent."""
    child = env._simulators._children[0]
    sent: list[str] = []
    send = child.send
    child.send = lambda command: (sent.append(command[0]), send(command))
    return sent


def test_a_chunk_and_what_is_seen_after_it_take_one_message(closed: Any) -> None:
    env = closed(made(1))
    env.reset()
    sent = commands_of(env)
    env.step(np.zeros((3, 1, 2), np.float32))
    assert sent == ["step"]
    env.step(np.zeros((3, 1, 2), np.float32))
    sent.clear()
    # The limit of 5 steps comes before the end of the chunk; all begin again.
    result = env.step(np.zeros((3, 4, 2), np.float32))
    assert sent == ["map", "step", "reset"]
    sent.clear()
    env.step(np.zeros((3, 4, 2), np.float32))
    assert sent == ["step"]
    assert result.final_observations["states"][:, 1].tolist() == [5, 5, 5]
    assert result.observations["states"][:, 1].tolist() == [0, 0, 0]


def test_chunk_reports_every_action_to_observers(closed: Any) -> None:
    env = closed(made(1))
    env.reset()
    seen: list[int] = []
    env.watcher = lambda *_: seen.append(int(env.look(np.arange(1))["images.main"].max()))
    env.step(np.zeros((3, 2, 2), np.float32))
    assert seen == [1, 2]


def test_what_only_some_environments_do_is_seen(closed: Any) -> None:
    envs = [closed(made(processes)) for processes in (0, 2)]
    starts = next(result["states"][:, 0] for result in [env.reset() for env in envs])
    # An environment ends beyond 8, and one that is nearer to it ends earlier within the chunk.
    assert 4 <= starts.max() != starts.min()
    here, apart = (env.step(np.ones((3, 5, 2), np.float32)) for env in envs)
    assert here.terminations[:, :4].any()
    assert (here.rewards == apart.rewards).all()
    for one, other in ((here.observations, apart.observations), (here.final_observations, apart.final_observations)):
        for name, array in one.items():
            assert (other[name] == array).all(), name


@pytest.mark.parametrize("processes", [0, 2])
def test_an_expert_acts_wherever_the_simulator_is(processes: int, closed: Any) -> None:
    env = closed(made(processes))
    env.reset()
    env.step(np.zeros((3, 1, 2), np.float32))
    actions = env.expert()
    assert actions.dtype == np.float32
    assert actions.tolist() == [[1, -1]] * 3
    assert closed(made(processes, task="many")).expert() is None


def test_a_running_episode_is_continued_in_other_processes(closed: Any) -> None:
    env, again = closed(made(2)), closed(made(1))
    env.reset()
    env.step(random_actions(env.spec, 3, chunk=3))
    state = unpack([pack([env.save()], "")], "", again.numbers)
    assert again.load(state)
    one, other = (item.step(random_actions(env.spec, 3, seed=1)) for item in (env, again))
    assert (one.observations["states"] == other.observations["states"]).all()


def test_groups_get_tasks_of_a_set_and_share_their_starts() -> None:
    settings = EnvSettings(num_envs=12, task="many", group_size=2, num_processes=0, total_envs=12)
    env = FakeEnv(settings)
    assert env.tasks == [name for name in ("one", "two", "three") * 2 for _ in range(2)]
    first, second = (env.reset()["states"][::2, 2].tolist() for _ in range(2))
    # Two groups for each task: the first reset takes the starts 0 and 1 of each, the second one 2 and 3.
    assert first == [0, 0, 0, 1, 1, 1]
    assert second == [2, 2, 2, 3, 3, 3]
    later = FakeEnv(EnvSettings(num_envs=6, first_env=6, task="many", group_size=2, num_processes=0, total_envs=12))
    assert later.reset()["states"][::2, 2].tolist() == [1, 1, 1]


@pytest.mark.parametrize("at", ["make", "step", "observe"])
def test_a_segfault_names_the_process_and_the_place(at: str, closed: Any) -> None:
    with pytest.raises(SimulatorDiedError) as caught:
        moved(closed(made(2, breaks="segfault", at=at)))
    error = caught.value
    assert error.address == "EnvGroup:0"
    assert "simulator process 1 of 2 (`one`, environment 0 of its batch): signal 11 (SIGSEGV)" in error.why
    assert {"make": "making", "step": "stepping", "observe": "observing"}[at] + " environment 0" in error.why
    assert "the mesh has 0 faces" in error.why  # its last words
    assert "_maybe_break" in error.why


@pytest.mark.parametrize("how", ["sleep", "hold"])
def test_a_simulator_that_hangs_is_ended(how: str, closed: Any) -> None:
    env = closed(made(1, breaks=how))
    with pytest.raises(SimulatorDiedError, match="no response for 1 s, stepping environment 0"):
        moved(env)


def test_an_exception_and_an_exit_are_told(closed: Any, capfd: pytest.CaptureFixture[str]) -> None:
    env = closed(made(1, num_envs=1, breaks="raise", at="reset", after=0))
    words = r"raised ValueError: the mesh has 0 faces at \S+/fake_simulators.py:\d+ in \w+ \(environment 0"
    with pytest.raises(SimulatorError, match=words) as caught:
        moved(env)
    assert "a new simulator that began the episode again raised as well" in str(caught.value)
    env.close()
    assert "Traceback" in capfd.readouterr().err
    env = closed(made(1, breaks="exit"))
    with pytest.raises(SimulatorDiedError, match="it ended with exit code 3, stepping environment 0"):
        moved(env)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("at", ["step", "observe"])
def test_new_simulator_repeats_an_episode(
    processes: int, at: str, closed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = np.random.default_rng(0).uniform(0, 1, (4, 1, 2, 2)).astype(np.float32)
    quiet = closed(made(processes, num_envs=1))
    monkeypatch.setattr(FakeSimulation, "made", 0)
    raising = closed(made(processes, num_envs=1, breaks="raise-first", at=at))
    results = [(env.reset(), [env.step(chunk) for chunk in actions])[1] for env in (quiet, raising)]
    for before, after in zip(*results, strict=True):
        assert after.failed is None
        np.testing.assert_array_equal(after.rewards, before.rewards)
        np.testing.assert_array_equal(after.observations["states"], before.observations["states"])


@pytest.mark.parametrize("processes", [0, 1])
def test_failed_episode_is_left_out(processes: int, closed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSimulation, "made", 0)
    env = closed(made(processes, num_envs=2, breaks="drift"))
    env.reset()
    first, second = [env.step(np.ones((2, 2, 2), np.float32)) for _ in range(2)]
    assert first.failed.tolist() == [True, False]  # only the first is made again
    assert first.valid.any(axis=1).tolist() == [False, True]
    assert first.truncations[0].tolist() == [False, True]
    assert len(first.episodes.env) == 0
    assert np.isfinite(second.observations["states"]).all()


@pytest.mark.parametrize("processes", [0, 1])
def test_episode_differs_after_observing_raised(processes: int, closed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSimulation, "made", 0)
    env = closed(made(processes, num_envs=1, breaks="drift", at="observe"))
    env.reset()
    seen, after = [env.step(np.ones((1, 2, 2), np.float32)) for _ in range(2)]
    assert seen.failed is None
    assert after.failed.tolist() == [True]


@pytest.mark.parametrize("processes", [0, 1])
def test_wrong_task_or_option_is_a_configuration_error(processes: int) -> None:
    with pytest.raises(ConfigError, match="no task `unknown`"):
        made(processes, task="unknown")
    with pytest.raises(ConfigError, match="`brakes`") as caught:
        made(processes, brakes=True)
    assert "`breaks`" in (caught.value.help or "")


def test_processes_end_with_their_worker_whatever_they_do() -> None:
    script = f"""
import numpy as np, os, sys
sys.path[:0] = {sys.path!r}
from tests.unit.recipes.embodied.envs.processes.test_simulator_processes import made
env = made(2, breaks="hold")
env.reset()
print(*(child._process.pid for child in env._simulators._children), flush=True)
for _ in range(3):
    env.step(np.zeros((3, 1, 2), np.float32))
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in known(worker.stdout).readline().split()]
    assert len(pids) == 2
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    until(lambda: not any(_runs(pid) for pid in pids), "the end of the simulator processes")


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_ends_the_processes() -> None:
    env = made(2)
    children: list[Any] = list(env._simulators._children)
    env.close()
    env.close()
    assert [child._process.returncode for child in children] == [0, 0]


@pytest.mark.parametrize(
    ("error", "file"),
    [
        (FileNotFoundError(2, "No such file or directory", "/opt/sim/assets/robot.xml"), "/opt/sim/assets/robot.xml"),
        (OSError("File /opt/sim/assets/reach.xml does not exist"), "/opt/sim/assets/reach.xml"),
        (ValueError("Error: Error opening file 'link_0.stl': No such file"), "link_0.stl"),
    ],
)
def test_a_simulator_that_lacks_a_file_says_which(error: Exception, file: str) -> None:
    fault = known_fault(error)
    assert fault is not None
    assert f"`{file}`" in fault.message
    assert "rlinf venv setup" in str(fault.help)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("Cannot initialize a EGL device display. This likely means that your driver does not support it"),
        RuntimeError("an OpenGL platform library has not been loaded into this process"),
        AttributeError("'NoneType' object has no attribute 'glGetError'"),
        RuntimeError("invalid value for environment variable MUJOCO_GL: egll"),
    ],
)
def test_a_driver_that_does_not_render_is_told_with_a_remedy(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    fault = known_fault(error)
    assert fault is not None
    assert "cannot render images with MUJOCO_GL=egl" in fault.message
    assert str(error) in str(fault.why)
    assert "libegl1" in str(fault.help)


@pytest.mark.parametrize("processes", [0, 1])
def test_unrenderable_simulation_ends_the_run_with_a_remedy(processes: int, closed: Any) -> None:
    env = closed(made(processes, breaks="dark", at="observe", after=0))
    with pytest.raises(ConfigError, match="cannot render images") as caught:
        env.reset()
    assert "libegl1" in str(caught.value.help)


@pytest.mark.parametrize("error", [ValueError("a size is 0"), OSError(f"{__file__} is no model"), KeyError("a.xml")])
def test_other_faults_of_a_simulator_stay_as_they_are(error: Exception) -> None:
    assert known_fault(error) is None
