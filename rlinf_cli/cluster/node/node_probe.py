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
from typing import Any

from rlinf_cli.cluster.node.node_holdings import cluster_of, described, listeners
from rlinf_core.node.node_env import merged
from rlinf_core.node.node_facts import WITHOUT_WORKING_FOLDER, folder_of, machine, running
from rlinf_core.process.proc import processes_of

# Run by the node's interpreter in the node's environment, so that PYTHONPATH applies; imports nothing heavy.
_SOFTWARE = r"""
import hashlib, importlib.metadata as metadata, importlib.util as util, json, os, runpy
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def found(name):
    try:
        return util.find_spec(name)
    except (ImportError, ValueError):
        return None
def own_version(place):
    # Not that of an installed distribution: shipped code has none, and another project's may be called `rlinf`.
    try:
        return runpy.run_path(os.path.join(place, "version.py"))["__version__"] if place else None
    except (OSError, KeyError):
        return None
digest, places = hashlib.sha256(), {}
for name in ("rlinf_core", "recipes"):
    spec = found(name)
    roots = sorted(spec.submodule_search_locations or ()) if spec else []
    if roots:
        places[name] = roots[0]
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            for file in sorted(files):
                if file.endswith(".py"):
                    path = os.path.join(folder, file)
                    digest.update(os.path.relpath(path, root).encode() + b"\0")
                    with open(path, "rb") as source:
                        digest.update(source.read() + b"\0")
print(json.dumps({
    "python": list(sys.version_info[:3]),
    "ray": version("ray") if found("ray") else None,
    "rlinf": own_version(places.get("rlinf_core")),
    "fingerprint": digest.hexdigest()[:16] if "rlinf_core" in places else None,
    "places": places,
}))
"""
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


def software(env: dict[str, str], interpreter: str = sys.executable) -> dict[str, Any]:
    """Return the versions that an interpreter reports, or its error."""
    try:
        done = subprocess.run(
            [interpreter, "-c", WITHOUT_WORKING_FOLDER + _SOFTWARE],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SOFTWARE_SECONDS,
            check=False,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])
    except subprocess.TimeoutExpired:
        fault = f"it did not answer within {_SOFTWARE_SECONDS:g} s"
    except (OSError, ValueError, IndexError) as error:
        fault = str(error) or type(error).__name__
    return {"python": list(sys.version_info[:3]), "ray": None, "rlinf": None, "fingerprint": None, "fault": fault}


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
        "taken": taken_ports(request.get("ports", {}), set(processes_of(cluster, folder))),
        **software(env),
    }
