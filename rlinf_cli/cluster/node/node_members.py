"""Queries of the head for its nodes and jobs, and ending jobs.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from rlinf_cli.cluster.node import node_holdings, node_probe
from rlinf_cli.cluster.node.node_ray import NodeError
from rlinf_core.node import node_facts as facts
from rlinf_core.process import proc as processes

_PAUSE = 0.1


def members(request: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes and jobs that the head lists, after waiting for the nodes `wanted` until `deadline`.

    Raises:
        NodeError: the head cannot be queried.
    """
    folder = facts.folder_of(request["cluster"])
    record = facts.read_record(folder)
    if record is None or not processes.alive(record.get("process")):
        raise NodeError("the head is not up", why="its Ray has ended" if record else "this cluster does not run there")
    env = node_probe.environment(record)
    token = os.path.join(folder, "token")
    env["RAY_AUTH_MODE"] = "token" if os.path.exists(token) else "disabled"
    env["RAY_AUTH_TOKEN_PATH"] = token
    wanted = [str(rank) for rank in request.get("wanted", ())]
    seconds = float(request["deadline"])
    reply = node_probe.ask_interpreter(
        env, "members", record["gcs"], json.dumps(wanted), str(seconds), seconds=seconds + 20
    )
    if "fault" in reply:
        raise NodeError("the head cannot be queried", why=reply["fault"])
    return reply["found"]


def end_jobs(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the drivers on this node to end, and wait for them until the deadline; return the number left.

    A pid alone may be another process, as in a container, so the command must match the driver's, too.
    """
    end = time.monotonic() + float(request["deadline"])
    record = facts.read_record(facts.folder_of(request["cluster"])) or {}
    drivers = {
        job["pid"]: processes.identity(job["pid"])
        for job in request["jobs"]
        if job["address"] == record.get("address") and node_holdings.command_of(job["pid"]) == job["command"]
    }
    processes.send(list(drivers), signal.SIGTERM)
    remaining = [driver for driver in drivers.values() if processes.alive(driver)]
    while remaining and time.monotonic() < end:
        time.sleep(_PAUSE)
        remaining = [driver for driver in remaining if processes.alive(driver)]
    return {"told": len(drivers), "left": len(remaining)}
