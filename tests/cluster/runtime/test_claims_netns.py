"""Two jobs on the accelerators of two hosts: the second waits for the first on a node that neither's driver is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ray_hosts
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import RayHosts
from tests.waiting import until

_SCRIPT = Path(__file__).with_name("claims_driver.py")
_STAND_INS = Path(__file__).parents[2] / "integration" / "advice" / "stand_ins"


@pytest.fixture(scope="module")
def pair(hosts: Hosts) -> Iterator[RayHosts]:
    """Ray on two hosts, with four stand-in accelerators each."""
    made = ray_hosts.RayHosts(hosts.folder / "ray-with-claims", hosts["trainer0"], hosts["trainer1"])
    try:
        for rank, name in enumerate(("trainer0", "trainer1")):
            made.begin(hosts[name], env={"RLINF_NODE_RANK": str(rank), "PYTHONPATH": str(_STAND_INS)})
            if not rank:
                made.wait_for_head()
        yield made
    finally:
        made.end()


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_a_job_waits_for_another_over_hosts(pair: RayHosts, hosts: Hosts) -> None:
    head = hosts["trainer0"]
    with (
        ray_hosts.driver(pair, head, _SCRIPT, str(_STAND_INS)) as first,
        ray_hosts.driver(pair, head, _SCRIPT, str(_STAND_INS)) as second,
    ):
        assert [first.call("join"), second.call("join")] == [8, 8]
        assert first.call("launch", "wait", "3-5") == [[0, 3], [1, 0], [1, 1]]
        refusal = second.call("launch", "no-wait", "2,5")
        assert refusal.startswith("another job holds accelerator 1 of node 1: claims_driver.py, process ")
        # All or nothing: what was free on the first node is free again.
        until(lambda: first.call("held") == [["STAND:3"], ["STAND:0", "STAND:1"]], "what was not used to be free", 60)
        second.begin("launch", "wait", "2,5")
        until(lambda: first.call("waiting"), "the wait of the second", 60)
        first.begin("die")
        assert second.result() == [[0, 2], [1, 1]]
        until(lambda: second.call("held") == [["STAND:2"], ["STAND:1"]], "the claims of the first to end", 60)


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_nobody_steps_in_between_two_attempts_of_a_run(pair: RayHosts, hosts: Hosts) -> None:
    head = hosts["trainer0"]
    with (
        ray_hosts.driver(pair, head, _SCRIPT, str(_STAND_INS)) as run,
        ray_hosts.driver(pair, head, _SCRIPT, str(_STAND_INS)) as other,
    ):
        run.call("begin_run")
        assert [run.call("join"), other.call("join")] == [8, 8]
        assert run.call("launch", "wait", "3-4") == [[0, 3], [1, 0]]
        run.call("end_attempt")
        refusal = other.call("launch", "no-wait", "4")
        assert refusal.startswith("another job holds accelerator 0 of node 1: ")
        assert "runs/mine" in refusal
        assert run.call("join") == 8
        assert run.call("launch", "no-wait", "3-4") == [[0, 3], [1, 0]]
        assert run.call("held") == [["STAND:3"], ["STAND:0"]]
        run.call("end_run")
        until(lambda: other.call("held") == [[], []], "the end of the run's claims", 60)
