"""A Ray that somebody started by hand on each host, with `RLINF_NODE_RANK`, is accepted as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import PORT, RayHosts, with_env

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

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
    """Ray on `render0`, which is its head and has rank 1, and on `render1` with another interpreter and rank 0."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.ray = RayHosts(hosts.folder / "accepted", hosts["render0"], hosts["render1"])

    def begin(self) -> None:
        self.ray.begin(self.hosts["render0"], env={"RLINF_NODE_RANK": "1"})
        self.ray.wait_for_head()
        sim = str(self.hosts.interpreter("sim"))
        self.ray.begin(self.hosts["render1"], env={"RLINF_NODE_RANK": "0"}, python=sim)
        end = time.monotonic() + 90
        while self.listed().count("ALIVE") != 2:
            assert time.monotonic() < end, self.listed()
            time.sleep(0.5)

    def listed(self) -> str:
        """Return the states of the nodes, as Ray itself tells them."""
        code = (
            "import sys; from ray._raylet import GcsClient\n"
            "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values()\n"
            "print(*('ALIVE' if node.state == 0 else 'DEAD' for node in nodes))"
        )
        command = [sys.executable, "-c", code, self.ray.address]
        return self.hosts["render0"].run(with_env(self.ray.environment, command), check=False).stdout

    def rlinf(self, name: str, *arguments: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
        """Return what `rlinf` answers on a host."""
        env = {**self.ray.environment, "RLINF_ADDRESS": address or self.ray.address}
        command = [sys.executable, "-m", "rlinf_cli", *arguments]
        return self.hosts[name].run(with_env(env, command), check=False, timeout=200)


@pytest.fixture(scope="module")
def by_hand(hosts: Hosts) -> Iterator[ByHand]:
    made = ByHand(hosts)
    try:
        made.begin()
        yield made
    finally:
        made.ray.end()


def test_status_shows_it_on_each_of_its_nodes(by_hand: ByHand) -> None:
    def seen(name: str) -> dict[str, Any]:
        done = by_hand.rlinf(name, "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    addresses = [by_hand.hosts[name].address for name in ("render1", "render0")]
    for name in ("render0", "render1"):
        report = seen(name)
        assert (report["cluster"], report["address"], report["whole"]) == (None, by_hand.ray.address, True)
        assert [(node["rank"], node["address"]) for node in report["nodes"]] == list(enumerate(addresses))
        assert report["jobs"] == []


def test_a_machine_that_is_no_node_of_it_is_told_so(by_hand: ByHand) -> None:
    done = by_hand.rlinf("robot0", "status")
    assert done.returncode == 3, done.stderr
    assert f"this machine is not a node of the cluster at {by_hand.ray.address}" in done.stderr
    assert "StackTrace" not in done.stderr


def test_where_nothing_answers_is_told_at_once(by_hand: ByHand) -> None:
    address = f"{by_hand.hosts['render0'].address}:{PORT + 1}"
    done = by_hand.rlinf("render0", "status", address=address)
    assert done.returncode == 3, done.stderr
    assert f"the cluster at {address} does not answer" in done.stderr


def test_down_leaves_it_alone(by_hand: ByHand) -> None:
    done = by_hand.rlinf("render0", "down")
    assert (done.returncode, done.stdout) == (0, "no cluster is up\n")
    assert by_hand.listed().split() == ["ALIVE", "ALIVE"]


@pytest.mark.nightly
def test_a_job_trains_over_it(by_hand: ByHand, hosts: Hosts) -> None:
    # Under /var/tmp, which all hosts see.
    file, runs = by_hand.ray.folder / "two.yaml", by_hand.ray.folder / "runs"
    file.write_text(FILE.format(runs=runs))
    done = by_hand.rlinf("render0", "train", str(file), "--json")
    assert done.returncode == 0, done.stderr
    logs = Path(json.loads(done.stdout)["folder"]) / "logs"
    # Ranks are what `RLINF_NODE_RANK` says, though the head of Ray has another than 0.
    for part, name in (("actor", "render1"), ("rollout", "render1"), ("env", "render0")):
        assert hosts[name].address in (logs / part / "rank_0.log").read_text().splitlines()[0]
