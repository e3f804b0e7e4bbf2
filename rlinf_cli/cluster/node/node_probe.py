"""Facts about a node before anything is started there: versions, addresses, free space, running processes.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rlinf_cli.cluster.node import questions
from rlinf_cli.cluster.node.node_holdings import cluster_of, described, listeners
from rlinf_core.node.device_claims import listing
from rlinf_core.node.node_env import merged
from rlinf_core.node.node_facts import WITHOUT_WORKING_FOLDER, folder_of, machine, running
from rlinf_core.process.proc import processes_of

_QUESTION_SECONDS = 20.0
_SOFTWARE_SECONDS = 30.0


def code_folder(cluster: str) -> str:
    """Return the folder for code from `--sync`: beside the cluster's folder, as it is copied before Ray starts."""
    return f"{folder_of(cluster)}.code"


def environment(request: dict[str, Any]) -> dict[str, str]:
    """Return the environment for processes on this node: its own, with `env` and the synced code."""
    env = merged(os.environ, request.get("env", {}), ())
    if request.get("code"):
        env = merged(env, {"PYTHONPATH": code_folder(request["cluster"])}, ["PYTHONPATH"])
    # Our Ray authenticates as set here, whatever this user's login sets.
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        env.pop(name, None)
    return env


def ask_interpreter(
    env: dict[str, str],
    question: str,
    *arguments: str,
    interpreter: str = sys.executable,
    seconds: float = _QUESTION_SECONDS,
) -> dict[str, Any]:
    """Return an interpreter's answer to one of `questions`: `{"found": ...}` or `{"fault": "..."}`."""
    source = getattr(questions, "__source__", None)
    if source is None:
        # Elsewhere than on a node, where the module is its source alone.
        with open(str(questions.__file__), encoding="utf-8") as file:
            source = file.read()
    code = f"exec(compile({source!r}, 'questions', 'exec'))"
    return run_code(code, env, interpreter, seconds, question, *arguments)


def run_code(code: str, env: dict[str, str], interpreter: str, seconds: float, *arguments: str) -> dict[str, Any]:
    """Return the JSON that code prints in an interpreter: `{"found": ...}` or `{"fault": "..."}`."""
    try:
        done = subprocess.run(
            [interpreter, "-c", WITHOUT_WORKING_FOLDER + code, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return {"fault": lines[-1] if lines else f"exit code {done.returncode}"}
        return {"found": json.loads(done.stdout.decode().splitlines()[-1])}
    except subprocess.TimeoutExpired:
        return {"fault": f"no answer within {seconds:g} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"fault": str(error) or type(error).__name__}


def software(env: dict[str, str], interpreter: str = sys.executable, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions that an interpreter reports, of `packages` too, or its error as `fault`."""
    reply = ask_interpreter(env, "software", *packages, interpreter=interpreter, seconds=_SOFTWARE_SECONDS)
    unknown = {"python": list(sys.version_info[:3]), "ray": None, "rlinf": None, "fingerprint": None}
    return reply["found"] if "found" in reply else {**unknown, "fault": reply["fault"]}


def address_of_login() -> str | None:
    """Return the address at which ssh reached this machine, or None without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


def primary_address() -> str:
    """Return the address of the default route; loopback without a network."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def taken_ports(ports: dict[str, int], own: set[int]) -> list[list[Any]]:
    """Return those of `ports` that a process other than `own` listens on: [use, port, process]."""
    owners = listeners()

    def listener(pid: int) -> str:
        cluster = cluster_of(pid)
        return described(pid) + (f" of cluster `{cluster}` (`rlinf down --name {cluster}`)" if cluster else "")

    return [
        [name, port, listener(owners[port])]
        for name, port in ports.items()
        if port in owners and owners[port] not in own
    ]


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node."""
    cluster = request["cluster"]
    folder = folder_of(cluster)
    env = environment(request)
    existing = os.path.dirname(os.path.dirname(folder))
    record = running(folder)
    disk = shutil.disk_usage(existing)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "hostname": socket.gethostname(),
        "user": os.getuid(),
        "machine": machine(),
        "interpreter": sys.executable,
        "address": address_of_login(),
        "primary": primary_address(),
        "time": time.time(),
        "folder": folder,
        "disk_free": disk.free,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "cores": os.cpu_count() or 1,
        "record": record,
        "holders": listing(),
        "taken": taken_ports(request.get("ports", {}), set(processes_of(cluster, folder))),
        **software(env, packages=request.get("packages", ())),
    }
