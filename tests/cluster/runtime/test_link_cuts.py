"""Links that are cut between workers that wait for each other: for seconds they are waited for, for ever named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ray_hosts
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import RayHosts
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(600)]
_SECONDS = 4.0
_SCRIPT = Path(__file__).with_name("netns_driver.py")
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
def job(trio: RayHosts, hosts: Hosts) -> Iterator[Any]:
    """A driver with a worker on each host."""
    with ray_hosts.driver(trio, hosts["trainer0"], _SCRIPT) as made:
        until(lambda: has_joined(made), "the head's own node", 120, 1.0)
        made.call("launch", [0, 1, 2])
        yield made


def has_joined(job: Any) -> bool:
    """Return whether the driver has joined: on a busy machine the head's port is there long before its node."""
    try:
        job.call("join", len(NAMES))
    except AssertionError as error:
        if "no node is alive" not in str(error):
            raise
        return False
    return True


def begin(job: Any, trio: RayHosts, name: str, one: int, other: int) -> Path:
    """Have two workers pass messages to and fro; return the file that ends it."""
    folder = trio.folder / name
    folder.mkdir()
    job.begin("rally", one, other, str(folder))
    until((folder / "begun").exists, "a first turn", 60)
    return folder / "stop"


@pytest.mark.parametrize("of", ["the driver", "two workers"])
def test_link_cut_for_seconds_is_waited_for(job: Any, trio: RayHosts, hosts: Hosts, of: str) -> None:
    """Both wait for each other meanwhile, as in a deadlock, and a message is on its way."""
    one, other = (0, 1) if of == "the driver" else (1, 2)
    stop = begin(job, trio, of, one, other)
    with hosts[NAMES[other]].unplugged() if one == 0 else hosts[NAMES[one]].apart_from(hosts[NAMES[other]]):
        time.sleep(_SECONDS)
    stop.touch()
    (turns, longest), (answers, _) = job.result()
    assert turns == answers > 1
    assert longest >= _SECONDS - 1


def test_link_cut_for_ever_is_named_with_its_node(job: Any, trio: RayHosts, hosts: Hosts) -> None:
    begin(job, trio, "for ever", 1, 2)
    with hosts[NAMES[1]].apart_from(hosts[NAMES[2]]):
        failures = job.result()
    assert failures
    for failure in failures:
        assert failure.startswith("WorkerDiedError: "), failure
        assert "its host no longer answers" in failure
        assert any(f"node {rank} ({hosts[NAMES[rank]].address})" in failure for rank in (1, 2))
