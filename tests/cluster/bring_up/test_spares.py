"""Nodes are lost while a job runs over four machines: a spare serves in the place of one, with equal results; without
spares an elastic component goes on with fewer processes, which come back with their node."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_events import RunEvent, story_with_faults
from tests.cluster.hosts import Hosts
from tests.cluster.started_run import started_run
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(1800)]

NAMES = ("trainer0", "render0", "render1", "robot0")
FILE = """\
recipe: embodied
cluster:
  num_nodes: 4
  spare_nodes: 1
  ports: 23000-23199
  node_groups:
    - {{label: train, node_ranks: 0, hosts: trainer0}}
    - {{label: sim, node_ranks: 1-3, hosts: [render0, render1, robot0]}}
  component_placement:
    actor,rollout: {{node_group: train, placement: 0}}
    env: {{node_group: sim, placement: all}}
env:
  train: {{total_num_envs: 32, max_episode_steps: 20, max_steps_per_rollout_epoch: 20}}
actor: {{global_batch_size: 320}}
runner:
  max_steps: 10
  val_check_interval: -1
  save_interval: 2
  logger: {{log_path: {runs}}}
"""


class Four:
    """The cluster of `FILE`, from the control host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "four"
        self.folder.mkdir()
        self.file = self.folder / "four.yaml"
        self.file.write_text(FILE.format(runs=self.folder / "runs"))
        self._env = {"XDG_STATE_HOME": str(self.folder / "state")}

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env=self._env, timeout=600)

    def up(self) -> None:
        done = self.rlinf("up", str(self.file), "--timeout", "300")
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def training(self, name: str, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """A run that has saved a checkpoint, and its folder."""
        runs = self.folder / name
        command = [sys.executable, "-m", "rlinf_cli", "train", str(self.file), f"runner.logger.log_path={runs}"]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.hosts.control.spawn([*command, *overrides], env=self._env, **options)
        saved = "*/checkpoints/global_step_*/manifest.json"
        with started_run(process, runs, lambda: any(runs.glob(saved)), "the first checkpoint", seconds=600) as run:
            yield run


@pytest.fixture(scope="module")
def four(hosts: Hosts) -> Iterator[Four]:
    made = Four(hosts)
    made.up()
    yield made
    made.rlinf("down", "--force")


def learned(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "speed/", "memory/")
    return [{name: value for name, value in line["metrics"].items() if not name.startswith(measured)} for line in lines]


def test_spare_serves_as_the_host_that_is_lost(four: Four) -> None:
    with four.training("lost") as (process, disturbed):
        four.hosts["render0"].kill()
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    lost, spare = four.hosts["render0"].address, four.hosts["robot0"].address
    assert f"node 3 ({spare}), a spare, serves as node 1; node 1 ({lost}) joined and was lost" in out
    why = four.rlinf("why", str(disturbed)).stdout
    assert "cannot be reached any more" in why, why
    assert f"node 3 ({spare}), a spare, serves as node 1" in why
    # The node comes back, and has its own place again where the next run begins.
    four.hosts["render0"].restart()
    four.up()
    done = four.rlinf("train", str(four.file), "--json")
    assert done.returncode == 0, done.stderr
    assert "a spare, serves" not in done.stderr
    undisturbed = Path(json.loads(done.stdout)["folder"])
    assert learned(disturbed) == learned(undisturbed)


ELASTIC = (
    *("cluster.spare_nodes=0", "cluster.component_placement.env={node_group: sim, placement: all, elastic: true}"),
    *("env.train.total_num_envs=24", "actor.global_batch_size=240", "runner.max_steps=-1", "runner.save_interval=1"),
)


class Steps:
    """The finished steps of a run that goes on, as they are seen."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.last = 0

    def until_event(self, text: str, after: int) -> RunEvent:
        """Return the first event of the nodes with this text that follows `after` others, once a step has followed."""
        seen: list[RunEvent] = []

        def look() -> bool:
            step = max(self.numbers(), default=0)
            events = [event for event in story_with_faults(self.run)[0] if event.kind == run_events.NODES]
            seen[:] = [event for event in events[after:] if text in event.text]
            # Read before the events: it had finished before one that is not there yet.
            self.last = self.last if seen else max(self.last, step)
            return bool(seen) and step > seen[0].step

        until(look, text, 600, 0.1)
        return seen[0]

    def numbers(self) -> list[int]:
        """Return the steps that the run has kept."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [int(json.loads(line)["step"]) for line in lines if line.endswith("\n")]


def test_elastic_node_goes_and_comes_back_twice(four: Four) -> None:
    address = four.hosts["render0"].address
    with four.training("elastic", *ELASTIC) as (process, run):
        steps = Steps(run)
        for turn in range(2):
            four.hosts["render0"].kill()
            lost = steps.until_event("`env` goes on without node 1", 2 * turn)
            assert address in lost.details[0]
            # But for the step whose checkpoint was being written.
            assert lost.step >= steps.last - 1
            four.hosts["render0"].restart()
            four.up()
            back = steps.until_event("node 1 is back", 2 * turn + 1)
            assert back.step >= steps.last
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 143, out
    story, _ = story_with_faults(run)
    assert len([event for event in story if event.kind == run_events.RESTARTED]) == 2
    numbers = steps.numbers()
    assert numbers == list(range(1, len(numbers) + 1))
    assert "env: 3 processes" in out
