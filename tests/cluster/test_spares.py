"""A node is lost while a job runs over four machines: the spare serves in its place, and the results stay equal."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.started_run import started_run

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
    done = four.rlinf("train", str(four.file), "--output", "json")
    assert done.returncode == 0, done.stderr
    assert "a spare, serves" not in done.stderr
    undisturbed = Path(json.loads(done.stdout)["folder"])
    assert learned(disturbed) == learned(undisturbed)
