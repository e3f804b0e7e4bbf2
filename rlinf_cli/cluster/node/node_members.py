"""Queries of the head for its nodes and jobs, and ending jobs.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from rlinf_cli.cluster.node import node_holdings, node_probe
from rlinf_cli.cluster.node.node_ray import NodeError
from rlinf_core.node import node_facts as facts
from rlinf_core.process import proc as processes

_PAUSE = 0.1
# Run on the head: polls its GCS until the expected nodes are alive, or the time is over.
_MEMBERS = r"""
import json, sys, time
address, wanted, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
from ray._raylet import GcsClient
end, nodes, fault, client = time.monotonic() + seconds, [], None, None
while True:
    try:
        client = client or GcsClient(address=address)
        found = client.get_all_node_info(timeout=5)
        nodes = [{"address": n.node_manager_address, "rank": n.labels.get("rlinf.io/rank"), "id": k.hex(),
                  "alive": n.state == 0, "reason": n.death_info.reason_message} for k, n in found.items()]
        fault = None
    except Exception as error:
        fault = str(error).splitlines()[0] if str(error) else type(error).__name__
    alive = {n["rank"] for n in nodes if n["alive"]}
    if alive.issuperset(wanted) or time.monotonic() > end:
        break
    time.sleep(0.2)
jobs = []
if client is not None and fault is None:
    try:
        jobs = [{"id": k.hex() if hasattr(k, "hex") else str(k), "pid": j.driver_pid, "address": j.driver_ip_address,
                 "command": j.entrypoint, "started": j.start_time / 1000}
                for k, j in client.get_all_job_info(timeout=5).items()
                if not j.is_dead and not j.config.ray_namespace.startswith("_ray_internal")]
    except Exception as error:
        fault = str(error).splitlines()[0] if str(error) else type(error).__name__
print(json.dumps({"nodes": nodes, "jobs": jobs, "fault": fault}))
"""


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
    command = [sys.executable, "-P", "-c", _MEMBERS, record["gcs"], json.dumps(wanted), str(seconds)]
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds + 20,
            check=False,
            cwd=folder,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise NodeError("the head does not answer", why=f"no answer within {seconds + 20:.0f} s") from None
    except (OSError, ValueError, IndexError) as error:
        raise NodeError("the head cannot be queried", why=str(error)) from None


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
