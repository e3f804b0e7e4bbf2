"""Groups over hosts: who hears of a host that is lost, and links that are cut."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ray_hosts
from tests.cluster.host import Host
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import Driver, RayHosts
from tests.waiting import until

_SCRIPT = Path(__file__).with_name("netns_driver.py")


@pytest.fixture(scope="module")
def pair(hosts: Hosts) -> Iterator[RayHosts]:
    """Ray on two hosts. The driver's, the head, has the higher rank: ranks are given, not guessed."""
    made = ray_hosts.RayHosts(hosts.folder / "ray-by-hand", hosts["trainer0"], hosts["trainer1"])
    try:
        made.begin(hosts["trainer0"], env={"RLINF_NODE_RANK": "1"})
        made.wait_for_head()
        made.begin(hosts["trainer1"], env={"RLINF_NODE_RANK": "0"})
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def job(pair: RayHosts, hosts: Hosts) -> Iterator[Driver]:
    """A driver on the head, with workers 0 on its host and 1 and 2 on the other one."""
    made: Any
    with ray_hosts.driver(pair, hosts["trainer0"], _SCRIPT) as made:
        made.nodes = made.call("join", 2)
        made.places = made.call("launch", [1, 0, 0])
        yield made


def inspect(pair: RayHosts, host: Host, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the workers that `rlinf ps` shows on a host, by name."""
    argv = [sys.executable, "-m", "rlinf_cli", "inspect", "workers", "--json"]
    done = host.run(ray_hosts.with_env({**pair.environment, **environment}, argv), check=False)
    assert done.returncode == 0, done.stderr
    return {worker["name"]: worker for worker in json.loads(done.stdout)["workers"]}


def until_it_waits(pair: RayHosts, host: Host, name: str) -> None:
    until(lambda: inspect(pair, host)[name]["waits_for"], f"a wait of {name}", 60)


@pytest.mark.netns
def test_nodes_have_the_ranks_of_their_environment(job: Any, hosts: Hosts) -> None:
    assert job.nodes == [
        [0, hosts["trainer1"].address, "trainer1"],
        [1, hosts["trainer0"].address, "trainer0"],
    ]
    assert [name for name, _, _ in job.places] == ["trainer0", "trainer1", "trainer1"]


@pytest.mark.netns
def test_tensors_pass_between_the_hosts(job: Any) -> None:
    sizes = [0, 10, 100_000, 5_000_000]
    assert job.call("exchange", 0, 1, sizes) == [[size / 2 for size in sizes]] * 2


@pytest.mark.netns
def test_workers_of_all_hosts_are_shown_at_the_driver(job: Any, pair: RayHosts, hosts: Hosts) -> None:
    shown = inspect(pair, hosts["trainer0"])
    assert list(shown) == ["driver", "peer:0", "peer:1", "peer:2"]
    assert [shown[name]["pid"] for name in list(shown)[1:]] == [pid for _, pid, _ in job.places]
    assert shown["peer:1"]["node"] == f"node 0 ({hosts['trainer1'].address})"


@pytest.mark.netns
def test_they_are_shown_on_the_other_host_too(job: Any, pair: RayHosts, hosts: Hosts) -> None:
    shown = inspect(pair, hosts["trainer1"], RLINF_ADDRESS=pair.address)
    assert list(shown) == ["driver", "peer:0", "peer:1", "peer:2"]
    assert shown["peer:0"]["pid"] == job.places[0][1]


@pytest.mark.netns
def test_a_death_on_the_other_host_is_told_with_its_evidence(job: Any, pair: RayHosts, hosts: Hosts) -> None:
    job.call("say", 2, "the last thing that it said")
    job.begin("death", 0, 2)
    until_it_waits(pair, hosts["trainer0"], "peer:0")
    hosts["trainer1"].run(["kill", "-KILL", str(job.places[2][1])])
    output = job.result()
    assert [one["address"] for one in output] == ["peer:2"] * 2
    assert [one["where"] for one in output] == ["peer:0", None]
    for one in output:
        assert one["node"] == f"node 0 ({hosts['trainer1'].address})"
        assert "the last thing that it said" in one["cause"]


@pytest.mark.netns
@pytest.mark.nightly
def test_a_vanished_host_is_named_with_its_node(job: Any, pair: RayHosts, hosts: Hosts) -> None:
    job.begin("death", 0, 1)
    until_it_waits(pair, hosts["trainer0"], "peer:0")
    with hosts["trainer1"].unplugged():
        output = job.result()
    for one in output:
        assert (one["address"], one["node"]) == ("peer:1", f"node 0 ({hosts['trainer1'].address})")
        assert "its host no longer answers" in one["cause"]


_SECONDS = 4.0
NAMES = ("trainer0", "trainer1", "render0")


@pytest.fixture(scope="module")
def trio(hosts: Hosts) -> Iterator[RayHosts]:
    """Ray on three hosts; that of the driver, the head, has rank 0."""
    made = RayHosts(hosts.folder / "ray-of-three", *(hosts[name] for name in NAMES))
    try:
        for rank, name in enumerate(NAMES):
            made.begin(hosts[name], env={"RLINF_NODE_RANK": str(rank)})
            if rank == 0:
                made.wait_for_head()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def job_over_a_link(trio: RayHosts, hosts: Hosts) -> Iterator[Any]:
    """A driver with a worker on each host."""
    with ray_hosts.driver(trio, hosts["trainer0"], _SCRIPT) as made:
        until(lambda: has_joined(made), "the head's own node", 120, 1.0)
        made.call("launch", [0, 1, 2])
        yield made


def has_joined(job_over_a_link: Any) -> bool:
    """Return whether the driver has joined: on a busy machine the head's port is there long before its node."""
    try:
        job_over_a_link.call("join", len(NAMES))
    except AssertionError as error:
        if "no node is alive" not in str(error):
            raise
        return False
    return True


def begin(job_over_a_link: Any, trio: RayHosts, name: str, one: int, other: int) -> Path:
    """Have two workers pass messages to and fro; return the file that ends it."""
    folder = trio.folder / name
    folder.mkdir()
    job_over_a_link.begin("rally", one, other, str(folder))
    until((folder / "begun").exists, "a first turn", 60)
    return folder / "stop"


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("of", ["the driver", "two workers"])
def test_link_cut_for_seconds_is_waited_for(job_over_a_link: Any, trio: RayHosts, hosts: Hosts, of: str) -> None:
    """Both wait for each other meanwhile, as in a deadlock, and a message is on its way."""
    one, other = (0, 1) if of == "the driver" else (1, 2)
    stop = begin(job_over_a_link, trio, of, one, other)
    with hosts[NAMES[other]].unplugged() if one == 0 else hosts[NAMES[one]].apart_from(hosts[NAMES[other]]):
        time.sleep(_SECONDS)
    stop.touch()
    (turns, longest), (answers, _) = job_over_a_link.result()
    assert turns == answers > 1
    assert longest >= _SECONDS - 1


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_link_cut_for_ever_is_named_with_its_node(job_over_a_link: Any, trio: RayHosts, hosts: Hosts) -> None:
    begin(job_over_a_link, trio, "for ever", 1, 2)
    with hosts[NAMES[1]].apart_from(hosts[NAMES[2]]):
        failures = job_over_a_link.result()
    assert failures
    for failure in failures:
        assert failure.startswith("WorkerDiedError: "), failure
        assert "its host no longer answers" in failure
        assert any(f"node {rank} ({hosts[NAMES[rank]].address})" in failure for rank in (1, 2))
