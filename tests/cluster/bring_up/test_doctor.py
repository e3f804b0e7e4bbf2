"""`rlinf doctor` and `status` over real ssh, on five hosts: sound ones, and every fault that a host can be given."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import until

if TYPE_CHECKING:
    from tests.cluster.host import Host
    from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

ROBOT = "10.99.0.1"
LAB = """\
cluster:
  num_nodes: 5
  ssh: {{connect_timeout: {timeout}}}
  component_placement:
    actor: {{node_group: trainer, placement: all}}
    rollout: {{node_group: render, placement: all}}
    env: {{node_group: robot, placement: 0}}
  node_groups:
    - label: trainer
      node_ranks: 0-1
      hosts: trainer[0-1]
      accelerators: {{per_node: {gpus}}}
    - label: render
      node_ranks: 2-3
      hosts: render[0-1]
      ignore_hardware: true
      env_configs:
        - {{node_ranks: 2, python_interpreter_path: {render0}}}
        - {{node_ranks: 3, python_interpreter_path: {render1}}}
    - label: robot
      node_ranks: 4
      hosts: robot0
      env_configs:
        - {{node_ranks: 4, python_interpreter_path: {robot0}}}
      hardware: {{type: Franka, configs: [{{node_rank: 4, robot_ip: {robot}}}]}}
"""
FINDINGS = dict[tuple[str, int | None], dict[str, Any]]


class Doctor:
    """Runs `rlinf doctor` on the file of the lab."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.path = folder / "lab.yaml"
        self.values: dict[str, Any] = {"timeout": 5, "gpus": 2, "robot": ROBOT}
        # Two of the hosts have a stack of their own.
        other = hosts.interpreter("render")
        self.values |= {"render0": other, "render1": other, "robot0": sys.executable}

    def run(self, *options: str) -> tuple[int, dict[str, Any]]:
        self.path.write_text(LAB.format(**self.values))
        done = self.hosts.control.rlinf("doctor", str(self.path), "--json", *options)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def doctor(hosts: Hosts, tmp_path: Path) -> Doctor:
    return Doctor(hosts, tmp_path)


def not_ok(data: dict[str, Any]) -> FINDINGS:
    """Return all but warnings: limits and the speed of links are those of the machine that runs the tests."""
    return {
        (finding["check"], finding["rank"]): finding
        for finding in data["findings"]
        if finding["verdict"] not in ("ok", "warning")
    }


def test_sound_hosts_have_no_fault_and_nothing_is_left_on_them(doctor: Doctor) -> None:
    hosts = doctor.hosts
    robot = hosts["robot0"]
    before = {host.name: (_ours(host), host.sh("ls -A /tmp /dev/shm")) for host in hosts.hosts}
    with ExitStack() as stack:
        for name in ("trainer0", "trainer1"):
            stack.enter_context(hosts[name].nvidia(2))
        stack.enter_context(robot.second_address(ROBOT))
        stack.enter_context(robot.listening(17310, ROBOT))
        code, data = doctor.run()
        text = hosts.control.rlinf("inspect", "hardware", str(doctor.path))
    assert (code, not_ok(data)) == (0, {})
    links = [finding["data"] for finding in data["findings"] if finding["check"] == "link"]
    assert {(link["from"], link["to"]) for link in links} == {
        *((rank, 0) for rank in range(1, 5)),
        *((3, 2), (3, 1), (4, 1), (4, 2), (4, 3)),
    }
    assert all(link["latency_seconds"] > 0 and link["bytes_per_second"] > 0 for link in links)
    # The interpreters are those of the file.
    assert len({finding["what"] for finding in data["findings"] if finding["check"] == "interpreter"}) == 2
    assert text.returncode == 0
    assert "2 NVIDIA" in text.stdout
    assert f"Franka at {ROBOT}:17310 answers" in text.stdout
    for host in hosts.hosts:
        processes, files = before[host.name]
        # What a test before this one has ended may still be going.
        until(lambda host=host, there=processes: _ours(host).items() <= there.items(), f"the end on {host.name}")
        assert host.sh("ls -A /tmp /dev/shm") == files


def _ours(host: Host) -> dict[int, str]:
    return {pid: args for pid, args in host.processes().items() if "python" in args}


def test_faults_of_machines_are_told_each_of_its_node(doctor: Doctor) -> None:
    hosts = doctor.hosts
    doctor.values |= {"gpus": 8}
    with ExitStack() as stack:
        stack.enter_context(hosts["trainer0"].nvidia(8))
        stack.enter_context(hosts["trainer1"].nvidia(7))
        stack.enter_context(hosts["render0"].listening(20001))
        stack.enter_context(hosts["render0"].small_shm(32))
        stack.enter_context(hosts["render1"].small_disk(8))
        # The robot is switched off, and its host cannot send to one of the others.
        hosts["robot0"].sh("ip route add unreachable 10.77.0.3/32")
        stack.callback(hosts["robot0"].sh, "ip route del unreachable 10.77.0.3/32")
        code, data = doctor.run()
    results = not_ok(data)
    assert code == 1
    assert set(results) == {("accelerators", 1), ("ports", 2), ("shm", 2), ("disk", 3), ("robot", 4), ("link", None)}
    assert {result["verdict"] for result in results.values()} == {"fault"}
    assert "7 of 8 declared were found" in results["accelerators", 1]["what"]
    assert "port 20001 (node manager)" in results["ports", 2]["what"]
    assert f"{ROBOT}:17310" in results["robot", 4]["what"]
    assert results["link", None]["data"]["from"] == 4
    assert results["link", None]["data"]["to"] == 2
    assert all(result["help"] for result in results.values())


def test_faults_of_interpreters_are_told_each_of_its_node(doctor: Doctor) -> None:
    hosts = doctor.hosts
    late = "import time; time.time = (lambda true: lambda: true() - 3600)(time.time)"
    doctor.values |= {
        "gpus": 0,
        "render0": hosts.interpreter("bare", ray=False),
        "render1": hosts.interpreter("newer", first_line="sys.version_info = (3, 12, 1, 'final', 0)"),
        "robot0": hosts.interpreter("late", first_line=late),
    }
    code, data = doctor.run("--link-seconds", "0")
    result = not_ok(data)
    assert code == 1
    assert "has no ray" in result["ray", 2]["what"]
    assert "pip install ray==" in result["ray", 2]["help"]
    assert "has no rlinf" in result["code", 2]["what"]
    assert "is Python 3.12.1, node 0 (trainer0) runs" in result["interpreter", 3]["what"]
    assert result["clock", 4]["verdict"] == "fault"
    assert 3590 < -result["clock", 4]["data"]["skew_seconds"] <= 3600


def test_nodes_that_are_not_reached_are_told_with_the_reason(doctor: Doctor) -> None:
    hosts = doctor.hosts
    doctor.values |= {"gpus": 0, "timeout": 2, "robot0": "/opt/nothing/python"}
    with ExitStack() as stack:
        hosts.control.forget_connections()
        stack.enter_context(hosts.control.known_hosts(wrong="trainer1"))
        stack.enter_context(hosts["render0"].refusing_keys())
        stack.enter_context(hosts["render1"].frozen())
        code, data = doctor.run("--link-seconds", "0")
    result = not_ok(data)
    assert (code, data["reached"]) == (3, 2)
    assert "host key changed" in result["reach", 1]["what"]
    assert "ssh-keygen -R" in result["reach", 1]["help"]
    assert "key refused" in result["reach", 2]["what"]
    assert "unreachable" in result["reach", 3]["what"]
    assert result["interpreter", 4]["what"].startswith("the interpreter `/opt/nothing/python` does not exist")


@pytest.mark.nightly
def test_status_tells_a_whole_cluster_and_a_missing_host(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("cluster: {num_nodes: 2, hosts: 'render[0-1]', ssh: {connect_timeout: 3}}")
    control = hosts.control
    up = control.rlinf("up", str(path))
    try:
        assert up.returncode == 0, up.stderr
        whole = control.rlinf("status", "--name", "pair", "--json")
        assert whole.returncode == 0, whole.stdout
        assert [node["state"] for node in json.loads(whole.stdout)["nodes"]] == ["up", "up"]
        # What is ours takes no port from us.
        again = control.rlinf("doctor", str(path), "--json")
        assert (again.returncode, not_ok(json.loads(again.stdout))) == (0, {})
        result = control.rlinf("inspect", "hardware", "--json")
        assert [node["host"] for node in json.loads(result.stdout)["nodes"]] == ["render0", "render1"]
        hosts["render1"].kill()
        partly = control.rlinf("status", "--name", "pair")
        assert partly.returncode == 3
        assert "1 of 2 nodes are up" in partly.stdout
        assert re.search(r"render1 +unreachable", partly.stdout)
    finally:
        if not hosts["render1"].alive:
            hosts["render1"].restart()
        down = control.rlinf("down", str(path))
    assert down.returncode == 0, down.stderr
