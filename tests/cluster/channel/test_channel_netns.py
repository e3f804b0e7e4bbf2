"""Channels between hosts, and with little shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ray_hosts
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import Driver

_SCRIPT = Path(__file__).with_name("channel_driver.py")
HEAD, OTHER = "render0", "render1"


@pytest.fixture(scope="module")
def job(hosts: Hosts) -> Iterator[Driver]:
    """A driver on the head, which is node 0. Each actor is on the host of its rank."""
    made: Any
    ray = ray_hosts.RayHosts(hosts.folder / "channels", hosts[HEAD], hosts[OTHER])
    try:
        ray.begin(hosts[HEAD], env={"RLINF_NODE_RANK": "0"})
        ray.wait_for_head()
        ray.begin(hosts[OTHER], env={"RLINF_NODE_RANK": "1"})
        with ray_hosts.driver(ray, hosts[HEAD], _SCRIPT) as made:
            made.pids = made.call("begin")
            yield made
    finally:
        ray.end()


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(("producer", "consumer"), [(0, 1), (1, 0)])
def test_items_pass_between_hosts_wherever_the_channel_is(job: Any, producer: int, consumer: int, node: int) -> None:
    # From what travels packed to more than one turn of reading, and more of them than the channel holds.
    sizes = [0, 1, 5_000, 200_000, 10_000_000, 10, 10, 3_000_000]
    result = job.call("pass_on", producer, consumer, node, sizes)
    assert result == [[number, size, number if size else 0] for number, size in enumerate(sizes)]


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_message_to_a_vanished_host_goes_to_the_next_consumer(job: Any, hosts: Hosts) -> None:
    sizes = {"small": 10, "large": 30_000_000}
    job.call("ask", 1, list(sizes), 1)
    # What is sent to it from now on, it cannot take.
    hosts[OTHER].run(["kill", "-STOP", str(job.pids[1])])
    assert job.call("hand_out", sizes) == [0, 0]
    job.call("ask", 0, list(sizes), 1)
    with hosts[OTHER].unplugged():
        assert job.call("answer", 0) == list(sizes.values())


_ROOT = Path(__file__).parents[3]
_SMALL_SHM = Path(__file__).with_name("small_shm.py")
_SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"')


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_items_of_up_to_100_mb_pass_where_dev_shm_has_64() -> None:
    if subprocess.run([*_SMALL, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    done = subprocess.run(
        [*_SMALL, sys.executable, str(_SMALL_SHM)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report == {"shm": 64 << 20, "whole": [1, 8, 32, 32, 32, 100]}
