"""Faults of a job on a simulated arm, and within a grab of it: the arm stands still, and what was recorded is kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import Record, read_segments
from recipes.embodied.robots.controller_client import FrankaClient
from rlinf_core.hardware.franka import Franka
from tests.integration.recipes.robots.grabbed_holder import CHUNK, PERSONS_ACTION, grabbed
from tests.integration.recipes.robots.standing import check_rest, check_stop, job_of
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(1500)]

REPOSITORY = Path(__file__).parents[4]
ENDS = 400.0  # seconds within which a job gets somewhere: a limit for one that hangs


class RunningJob:
    """A `rlinf train` on one arm, in a process of its own."""

    def __init__(self, folder: Path, arm: Franka, recording: Path, steps: int = 100) -> None:
        folder.mkdir()
        self.folder, self.recording = folder, recording
        replay = {"capacity": 1000, "recording_path": str(recording)}
        episode = {"max_episode_steps": 20, "max_steps_per_rollout_epoch": 20}
        job = job_of(
            arm,
            env={"train": {"env_type": "franka_robot", "total_num_envs": 1, **episode}},
            actor={"global_batch_size": 16, "model": {"model_type": "squashed_policy", "hidden_dim": 16}},
            algorithm={"loss_type": "sac", "learning_starts": 20, "replay": replay},
            runner={"max_steps": steps, "max_restarts": 0, "logger": {"log_path": "runs"}},
        )
        (folder / "job.yaml").write_text(job)
        self._errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlinf_cli", "train", "job.yaml"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RLINF_ADDRESS": "local"},
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def steps(self) -> int:
        """Return how many training steps are done."""
        lines = [line for file in (self.folder / "runs").glob("*/metrics.jsonl") for line in file.open()]
        return len([line for line in lines if line.endswith("\n") and "env/steps" in json.loads(line)["metrics"]])

    def last(self, metric: str) -> float:
        """Return a metric of the last training step."""
        (file,) = (self.folder / "runs").glob("*/metrics.jsonl")
        metrics = [json.loads(line)["metrics"] for line in file.open()]
        return [message[metric] for message in metrics if metric in message][-1]

    def trained(self, steps: int) -> bool:
        """Return whether so many are done; fails where the job has ended before."""
        assert self.process.poll() is None or self.steps() >= steps, self.errors()
        return self.steps() >= steps

    def errors(self) -> str:
        """Return what it has said so far, in one line of single blanks."""
        return " ".join((self.folder / "errors").read_text().split())

    def records(self) -> list[Record]:
        """Return what is on the disk, a rollout each."""
        return list(read_segments(self.recording / "0"))

    def recorded(self) -> int:
        """Return how many steps of the arm are on the disk."""
        return sum(int(record["valid"].sum()) for record in self.records())

    def keeps(self, before: list[Record]) -> None:
        """Check that the disk still begins with these records, and has all that the job has told of."""
        records = self.records()
        assert len(records) >= max(len(before), self.steps())
        for ours, theirs in zip(before, records, strict=False):
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                assert np.array_equal(array, theirs[name]), name

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


StartJob = Callable[..., RunningJob]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    jobs: list[RunningJob] = []

    def start(name: str, arm: Franka, recording: Path | None = None, **extra: Any) -> RunningJob:
        jobs.append(RunningJob(tmp_path / name, arm, recording or tmp_path / name / "recording", **extra))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def parse_holder(arm: Franka) -> int:
    """Return the process that holds an arm."""
    with FrankaClient(arm) as watcher:
        return int(re.findall(r"process (\d+) on", str(watcher.state().holder))[0])


def parent_of(process: int) -> int:
    """Return the process that started another."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", ["env worker", "driver", "Ray"])
def test_a_process_that_is_killed_leaves_an_arm_that_stands(victim: str, start_arm: Any, start_job: StartJob) -> None:
    arm, _ = start_arm()
    job = start_job("job", arm)
    until(lambda: job.trained(2), "the second step", ENDS)
    worker = parse_holder(arm)
    known = job.records()
    victims = {"env worker": worker, "driver": job.process.pid, "Ray": parent_of(worker)}
    os.kill(victims[victim], signal.SIGKILL)
    if victim == "Ray":
        # The worker hears of it, and may release the arm before it ends.
        stopped = check_rest(arm)
        assert stopped is None or f"process {worker} on" in stopped
    else:
        assert f"process {worker} on" in check_stop(arm)
    assert job.process.wait(ENDS) != 0
    assert len(known) >= 2
    job.keeps(known)
    if victim == "env worker":
        said = job.errors()
        assert "EnvGroup:0" in said, said
        assert "SIGKILL" in said or "killed" in said, said
    # Whoever begins again finds the arm free, and every step that was recorded.
    before = job.recorded()
    again = start_job("again", arm, job.recording, steps=1)
    assert again.process.wait(ENDS) == 0, again.errors()
    assert again.recorded() == before + 20
    assert again.last("replay/online") == before + 20
    again.keeps(known)


def test_of_two_jobs_at_one_arm_the_second_is_told_of_the_first(start_arm: Any, start_job: StartJob) -> None:
    arm, _ = start_arm()
    first = start_job("first", arm, steps=40)
    until(lambda: first.trained(1), "the first step", ENDS)
    holder = parse_holder(arm)
    second = start_job("second", arm)
    assert second.process.wait(ENDS) != 0
    said = second.errors()
    assert "the arm is in use" in said, said
    assert f"process {holder} on" in said
    assert f"{arm.robot_ip}:{arm.robot_port}" in said
    assert "end that process, or wait until it is done" in said
    assert first.process.wait(ENDS) == 0, first.errors()
    assert first.recorded() == 40 * 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts file systems of a size of their own, in memory."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system cannot be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for item in mounted:
        subprocess.run(["umount", "-l", str(item)], check=True)


def test_without_room_on_the_disk_nothing_moves(
    start_arm: Any, start_job: StartJob, small_disk: Callable[[str], Path]
) -> None:
    arm, _ = start_arm()
    disk = small_disk("4m")
    job = start_job("job", arm, disk / "steps")
    assert job.process.wait(ENDS) != 0
    said = job.errors()
    assert "the recording cannot be written" in said, said
    assert str(disk / "steps") in said
    assert "free space on that disk, or name another folder" in said
    check_stop(arm)


def test_a_disk_that_fills_up_loses_nothing(
    start_arm: Any, start_job: StartJob, small_disk: Callable[[str], Path]
) -> None:
    arm, _ = start_arm()
    disk = small_disk("270m")
    job = start_job("job", arm, disk / "steps", steps=6)
    until(lambda: job.trained(1), "the first step", ENDS)
    known = job.records()
    with suppress(OSError), (disk / "another").open("wb") as other:
        while True:
            other.write(bytes(2**20))
            other.flush()
    assert job.process.wait(ENDS) != 0
    assert "the recording has no space for a record" in job.errors()
    assert known
    job.keeps(known)
    assert check_rest(arm) is None


SAID = {"unplugged": ("the device was lost", "plug it in again"), "not a number": ("not finite", "fix the source")}


def check_recorded(folder: Path, seed: int, messages: int, late: int) -> None:
    """Check that the chunks before the fault are there, and say tick by tick who moved the arm, and how.

    Args:
        folder: of the recording.
        seed: of the person's motions.
        told: chunks that the holder told of.
        late: actions that came too late on a busy machine; nothing of them was executed.
    """
    chunks = list(read_segments(folder))
    ticks, last = grabbed(seed)
    assert len(chunks) == messages == last // CHUNK
    for chunk, truth in zip(chunks, ticks.reshape(-1, CHUNK), strict=False):
        assert np.array_equal(chunk["flags"], truth)
        begun = int(truth.argmax())
        wanted = np.where(truth[:, None], PERSONS_ACTION, chunk["policy"])
        wrong = (np.abs(chunk["executed"] - wanted) > 1e-4).any(axis=1) & (truth | (np.arange(CHUNK) < begun))
        late -= int(wrong.sum())
        np.testing.assert_allclose(chunk["executed"][wrong], 0, atol=1e-4)
        # What is left of a chunk when they let go is nobody's: the policy has not seen what they did.
        np.testing.assert_allclose(chunk["executed"][begun:][~truth[begun:]], 0, atol=1e-4)
    assert late >= 0


@pytest.mark.parametrize("fault", ["killed", "hung", *SAID])
@pytest.mark.parametrize("seed", range(5))
def test_an_arm_that_was_grabbed_within_a_chunk_stands(fault: str, seed: int, start_arm: Any, tmp_path: Path) -> None:
    arm, _ = start_arm()
    words = ["-m", "tests.integration.recipes.robots.grabbed_holder", arm.robot_ip, str(arm.robot_port)]
    holder = subprocess.Popen(
        [sys.executable, *words, str(tmp_path), str(seed), fault],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        # Before that the arm stands because it was just switched on.
        assert holder.stdout.readline() == "recorded\n", holder.communicate()
        assert f"process {holder.pid} on" in check_stop(arm)
    finally:
        holder.kill()
    output, said = holder.communicate(timeout=60)
    check_recorded(tmp_path, seed, 1 + output.count("recorded"), said.count("came too late"))
    if fault in SAID:
        assert holder.returncode == 1, said
        assert all(words in said for words in SAID[fault]), said
