"""Faults by seed: when they strike, whom, what they do to a run, and what its life signs say."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.cluster import engine
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.node.process_life import identity_here, opened, own_identity, send
from rlinf_core.process.proc import MARK
from tests.chaos.__main__ import main
from tests.chaos.campaign import prepare_folder
from tests.chaos.disturbed_run import flip_bit, has_ended, without_room
from tests.chaos.fault_table import FAULTS, Deed, Target, chosen_faults
from tests.chaos.life_signs import LifeSigns
from tests.chaos.run_processes import RunProcess, RunProcesses
from tests.chaos.strike_plan import plan_of

names = st.lists(st.sampled_from(list(FAULTS)), min_size=1, unique=True)


@given(st.integers(), st.integers(1, 1000), names, st.integers(1, 9))
def test_plan_keeps_its_bounds(seed: int, steps: int, faults: list[str], most: int) -> None:
    plan = plan_of(seed, steps, faults, most)
    assert 1 <= len(plan.strikes) <= most
    assert [strike.step for strike in plan.strikes] == sorted(strike.step for strike in plan.strikes)
    for strike in plan.strikes:
        assert strike.fault in faults
        assert 0 <= strike.step < steps
        assert 0 <= strike.pick < 1
        assert 0 <= strike.delay <= 1
        assert (strike.seconds > 0) == (FAULTS[strike.fault].deed in (Deed.PAUSE, Deed.FILL))
    # A run that may restart nothing ends with its first death, and has no second.
    assert plan.max_restarts or len(plan.strikes) == 1


@given(st.integers(), st.integers(1, 1000))
def test_plan_is_a_function_of_its_seed(seed: int, steps: int) -> None:
    assert plan_of(seed, steps) == plan_of(seed, steps)


def test_plan_is_the_same_in_another_process() -> None:
    code = "from tests.chaos.strike_plan import plan_of; print([plan_of(seed, 30) for seed in range(20)])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str([plan_of(seed, 30) for seed in range(20)])


def test_seeds_draw_every_fault() -> None:
    drawn = Counter(strike.fault for seed in range(300) for strike in plan_of(seed, 30).strikes)
    assert drawn.keys() == FAULTS.keys()
    assert drawn["kill-worker"] == max(drawn.values())


def test_names_choose_faults() -> None:
    assert chosen_faults([]) == tuple(FAULTS)
    assert chosen_faults(["fill-actor", "freeze"]) == ("fill-actor", "freeze-worker")
    with pytest.raises(ConfigError, match="there is no fault `kill-wroker`") as caught:
        chosen_faults(["kill-wroker"])
    assert caught.value.help == "did you mean `kill-worker`?"


def test_run_without_any_sign_is_hung() -> None:
    signs = LifeSigns(90.0, 0.0)
    signs.note(10, 10, 50.0)
    signs.note(10, 10, 140.0)
    assert (signs.are_gone(140.0), signs.are_gone(140.1)) == (False, True)


def test_words_count_as_signs_for_four_deadlines() -> None:
    signs = LifeSigns(90.0, 0.0)
    for now in range(0, 1000, 30):
        signs.note(0, now, float(now))
    assert (signs.are_gone(360.0), signs.are_gone(1000.0)) == (False, True)


def test_fault_gives_time_anew() -> None:
    signs = LifeSigns(90.0, 0.0)
    signs.disturbed(80.0)
    assert (signs.are_gone(170.0), signs.are_gone(171.0)) == (False, True)


WRITES = """
import sys
from pathlib import Path
for line in sys.stdin:
    try:
        with open(line.strip(), "w") as file:
            file.write("x")
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_process_without_room_writes_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write() -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{tmp_path}/file\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        with opened(identity_here(process.pid)) as handle:
            answers = [write()]
            with without_room(process.pid):
                answers.append(write())
            answers.append(write())
            assert answers == ["written", "File too large", "written"]
            assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == resource.getrlimit(resource.RLIMIT_FSIZE)
            assert not has_ended(handle)
            process.kill()
            process.wait()
            assert has_ended(handle)
    finally:
        process.kill()
        process.communicate()


def test_dry_run_lists_the_faults_of_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("embodied/pick-laptop", "runner.max_steps=20", "--seeds", "5", "--fault", "kill", "--dry-run")
    assert main(arguments) == 0
    assert "nothing was started" in capsys.readouterr().err
    assert main((*arguments, "--json")) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "rlinf.chaos_plan/1"
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2, 3, 4]
    assert {strike["fault"].partition("-")[0] for run in record["runs"] for strike in run["strikes"]} == {"kill"}
    assert main((*arguments[:2], *arguments[4:], "--first-seed", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0] == record["runs"][3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embodied/pick-laptop", "runner.max_steps=-1"), "the job has no end"),
        (("hetero18",), "faults are planted into no job with robots"),
        (("embodied/pick-laptop", "--fault", "kil"), "there is no fault `kil`"),
        (("embodied/pick-laptop", "cluster.num_nodes=2"), "planted on this machine only"),
    ],
)
def test_job_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert main((*arguments, "--dry-run")) == 2
    assert words in capsys.readouterr().err


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "seed-0" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("kept")
    with pytest.raises(RunError, match="other files"):
        prepare_folder(tmp_path)
    assert mine.read_text() == "kept"
    fresh = tmp_path / "fresh"
    prepare_folder(fresh)
    (fresh / "seed-0").mkdir()
    prepare_folder(fresh)
    assert (fresh / "seed-0").is_dir()


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100))
    flip_bit(file)
    assert sum(byte.bit_count() for byte in file.read_bytes()) == 1


SLEEP = "import sys, time; print(flush=True); time.sleep(600)"


def sleeping(title: str, **environ: str) -> subprocess.Popen[bytes]:
    """A process with a title in its command line, once it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP, title], env={**os.environ, **environ}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of this process as a driver."""
    monkeypatch.setattr(engine, "base_folder", lambda: tmp_path)
    own = tmp_path / "driver"
    own.mkdir()
    (own / "owner").write_text(json.dumps(own_identity()._asdict()))
    return own


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_kinds_are_known_by_title(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    titles = {
        "gcs/gcs_server": Target.GCS_SERVER,
        "raylet/raylet": Target.RAYLET,
        "log_monitor.py": Target.LOG_MONITOR,
        "ray::ManagerProcess": Target.MANAGER,
        "ray::RuntimeEnvAgent": Target.RAY_AGENT,
    }
    pids: dict[Target, int] = {}
    for title, target in titles.items():
        started.append(sleeping(title, **{MARK: str(folder)}))
        pids[target] = started[-1].pid
    started.append(sleeping("raylet/raylet", **{MARK: "another's"}))
    processes = RunProcesses(own_identity(), {})
    for target, pid in pids.items():
        assert [process.identity.pid for process in processes.of(target)] == [pid]
    assert processes.of(Target.WORKER) == []
    assert [process.identity.pid for process in processes.of(Target.DRIVER)] == [os.getpid()]


def test_process_of_another_run_is_not_held(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: "another's"}))
    other = RunProcess("raylet", Target.RAYLET, identity_here(started[0].pid))
    with RunProcesses(own_identity(), {}).held(other) as handle:
        assert handle is None


def test_reused_pid_is_not_held(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: str(folder)}))
    earlier = identity_here(started[0].pid)._replace(start=f"{started[0].pid}:1")
    with RunProcesses(own_identity(), {}).held(RunProcess("raylet", Target.RAYLET, earlier)) as handle:
        assert handle is None


def test_own_process_is_killed(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: str(folder)}))
    processes = RunProcesses(own_identity(), {})
    (raylet,) = processes.of(Target.RAYLET)
    with processes.held(raylet) as handle:
        assert handle is not None
        send(handle, signal.SIGKILL)
    assert started[0].wait() == -signal.SIGKILL
    assert processes.of(Target.RAYLET) == []
