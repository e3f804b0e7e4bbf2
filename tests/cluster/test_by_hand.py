"""A Ray that somebody started by hand on each host, with `RLINF_NODE_RANK`, is accepted as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

PORT = 6379
FILE = """\
recipe: embodied
cluster:
  num_nodes: 2
  component_placement: {{"actor,rollout": {{node_group: node, placement: 0}}, env: {{node_group: node, placement: 1}}}}
env:
  train:
    {{env_type: franka_kin, task: pick, total_num_envs: 8, max_episode_steps: 10, max_steps_per_rollout_epoch: 10}}
actor: {{global_batch_size: 80}}
runner:
  max_steps: 1
  val_check_interval: -1
  logger: {{log_path: {runs}}}
"""


class ByHand:
    """Ray on `render0`, which is the head and has rank 1, and on `render1` with another interpreter and rank 0."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "by-hand"
        self.folder.mkdir()
        self.address = f"{hosts['render0'].address}:{PORT}"
        self.processes = [
            self._start("render0", 1, sys.executable, "--head", f"--port={PORT}", "--include-dashboard=false"),
            self._start("render1", 0, str(hosts.interpreter("sim")), f"--address={self.address}"),
        ]

    def _start(self, name: str, rank: int, python: str, *arguments: str) -> subprocess.Popen[str]:
        host = self.hosts[name]
        log = self.folder / f"{name}.log"
        command = [python, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={host.address}"]
        command += ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats", *arguments]
        with log.open("w") as file:
            process = host.spawn(
                ["env", f"RLINF_NODE_RANK={rank}", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        end = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        return process

    def rlinf(self, name: str, *arguments: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
        """What `rlinf` answers on a host."""
        command = ["env", f"RLINF_ADDRESS={address or self.address}", sys.executable, "-m", "rlinf_cli", *arguments]
        return self.hosts[name].run(command, check=False, timeout=200)

    def end(self) -> None:
        for host in ("render1", "render0"):
            pids = [str(pid) for pid, words in self.hosts[host].processes().items() if "ray" in words]
            self.hosts[host].run(["kill", "-9", *pids], check=False)
        for process in self.processes:
            process.wait(timeout=60)
        for host in ("render1", "render0"):
            self.hosts[host].sh("rm -rf /tmp/* /dev/shm/*")


@pytest.fixture(scope="module")
def by_hand(hosts: Hosts) -> Iterator[ByHand]:
    made = ByHand(hosts)
    yield made
    made.end()


def test_status_shows_it_on_each_of_its_nodes(by_hand: ByHand) -> None:
    def seen(name: str) -> dict[str, Any]:
        done = by_hand.rlinf(name, "status", "--output", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    addresses = [by_hand.hosts[name].address for name in ("render1", "render0")]
    for name in ("render0", "render1"):
        report = seen(name)
        assert (report["cluster"], report["address"], report["whole"]) == (None, by_hand.address, True)
        assert [(node["rank"], node["address"]) for node in report["nodes"]] == list(enumerate(addresses))
        assert report["jobs"] == []


def test_a_machine_that_is_no_node_of_it_is_told_so(by_hand: ByHand) -> None:
    done = by_hand.rlinf("robot0", "status")
    assert done.returncode == 3, done.stderr
    assert f"this machine is not a node of the cluster at {by_hand.address}" in done.stderr
    assert "StackTrace" not in done.stderr


def test_where_nothing_answers_is_told_at_once(by_hand: ByHand) -> None:
    begun = time.monotonic()
    address = f"{by_hand.hosts['render0'].address}:{PORT + 1}"
    done = by_hand.rlinf("render0", "status", address=address)
    assert done.returncode == 3, done.stderr
    assert f"the cluster at {address} does not answer" in done.stderr
    assert time.monotonic() - begun < 30


def test_down_leaves_it_alone(by_hand: ByHand) -> None:
    done = by_hand.rlinf("render0", "down")
    assert (done.returncode, done.stdout) == (0, "no cluster is up\n")
    assert [process.poll() for process in by_hand.processes] == [None, None]


@pytest.mark.nightly
def test_a_job_trains_over_it(by_hand: ByHand, hosts: Hosts) -> None:
    # Under /var/tmp, which all hosts see.
    file, runs = by_hand.folder / "two.yaml", by_hand.folder / "runs"
    file.write_text(FILE.format(runs=runs))
    done = by_hand.rlinf("render0", "train", str(file), "--output", "json")
    assert done.returncode == 0, done.stderr
    logs = Path(json.loads(done.stdout)["folder"]) / "logs"
    # Ranks are what `RLINF_NODE_RANK` says, though the head of Ray has another than 0.
    for part, name in (("actor", "render1"), ("rollout", "render1"), ("env", "render0")):
        assert hosts[name].address in (logs / part / "rank_0.log").read_text().splitlines()[0]
