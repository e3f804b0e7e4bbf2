"""The step in a run's state, as those see it who look from outside while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.live.progress import RunProgress
from rlinf_cli.run.run_documents import StateWriter
from rlinf_core.config.sections.runner import LoggerConfig, RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.runners import events
from rlinf_core.runners.storage.run_folder import RunFolder


class Disk:
    """A run that is written to a disk of known speed, on a clock of ours."""

    def __init__(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 0.0
        self.seconds = 0.0
        self.writes = 0
        self.progress = RunProgress(lambda: self.now)
        self.view = StateWriter(self.progress, folder)
        update = folder.update

        def slow(**changes: Any) -> None:
            self.now += self.seconds
            self.writes += 1
            update(**changes)

        monkeypatch.setattr(folder, "update", slow)

    def tell(self, event: events.Event) -> int:
        """Return the step that the state has after `event`."""
        self.progress.take(event)
        self.view.show(event)
        return RunFolder.open(self.folder.path).state.step


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    runner = RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path)))
    return Disk(RunFolder.create(runner, "fake"), monkeypatch)


def test_each_step_where_steps_are_slow_for_the_disk(disk: Disk) -> None:
    disk.seconds = 0.002
    for step in range(1, 20):
        disk.now += 0.15
        assert disk.tell(events.StepFinished(step, {})) == step


def test_slow_disk_bounds_cost_and_delay_of_records(disk: Disk) -> None:
    disk.seconds = 0.01
    for step in range(1, 1001):
        disk.now += 0.01
        assert step - disk.tell(events.StepFinished(step, {})) <= 50
    assert disk.writes * disk.seconds <= 0.022 * disk.now
    disk.seconds = 5.0
    disk.now += 10
    assert disk.tell(events.StepFinished(1001, {})) == 1001
    disk.now += 2
    assert disk.tell(events.StepFinished(1002, {})) == 1002


def test_what_lasts_is_written_at_once(disk: Disk) -> None:
    disk.seconds = 1.0
    disk.tell(events.StepFinished(1, {}))
    assert disk.tell(events.StepFinished(2, {})) == 1
    assert disk.tell(events.CheckpointSaved(2, disk.folder.path)) == 2
    disk.tell(events.StepFinished(3, {}))
    assert disk.tell(events.RunRestarted(2, 1, 3, "rollout:0 died")) == 2
    disk.tell(events.StepFinished(3, {}))
    assert disk.tell(events.RunFinished(3, {}, 1.0)) == 3


def test_full_disk_ends_no_run(disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    update = disk.folder.update

    def full(**changes: Any) -> None:
        raise RunError("the run folder cannot be written", where="runs/x", why="No space left on device")

    monkeypatch.setattr(disk.folder, "update", full)
    disk.tell(events.CheckpointSaved(2, disk.folder.path))
    assert disk.tell(events.RunRestarted(2, 1, 3, "rollout:0 died")) == 0
    assert [line for line in caplog.messages if "No space left" in line] == [
        "the current step cannot be written to runs/x: No space left on device"
    ]

    monkeypatch.setattr(disk.folder, "update", update)
    disk.now += 3
    assert disk.tell(events.StepFinished(3, {})) == 3
