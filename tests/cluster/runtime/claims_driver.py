"""The drivers of `test_claims_netns.py`: jobs on stand-in accelerators of two hosts."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from typing import Any

from rlinf_core import Cluster, Worker, WorkerGroup
from rlinf_core.cluster import driver_job
from rlinf_core.errors import DeviceHeldError
from rlinf_core.hardware.accelerators import register_accelerator
from rlinf_core.node.device_claims import listing
from tests.cluster.steps import serve

sys.path.insert(0, sys.argv[1])

from stand_in_accelerator import StandAccelerator


class Peer(Worker):
    def place(self) -> tuple[int, int]:
        info = self.worker_info
        return info.node_id, info.available_gpus[0]


cluster: Cluster
kept = ExitStack()
groups: list[WorkerGroup[Peer]] = []


def join() -> int:
    global cluster
    cluster = Cluster(num_nodes=2)
    return cluster.num_accelerators


def launch(mode: str, ranks: str) -> Any:
    """Return the node and the accelerator of each worker, or the refusal in words."""
    os.environ["RLINF_CLAIMS"] = mode
    try:
        group = Peer.create_group().launch(cluster, ranks)
    except DeviceHeldError as error:
        return error.message
    groups.append(group)
    return group.place().wait()


def begin_run() -> None:
    """Keep devices over several clusters, as a run does."""
    kept.enter_context(driver_job.kept_claims("/runs/mine"))


def end_run() -> None:
    cluster.shutdown()
    kept.close()


def end_attempt() -> None:
    """Leave the cluster as a run does whose next attempt follows."""
    driver_job.leave_claims(cluster)
    groups.clear()
    cluster.shutdown()


def waiting() -> list[str]:
    return [one["about"]["waits_for"] for one in listing()["waiting"]]


def held() -> list[list[str]]:
    """Return the devices that are held on each node."""
    return [[one["device"] for one in said["claims"]] for said in cluster.ask_nodes(listing)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


register_accelerator(StandAccelerator())
serve(globals())
