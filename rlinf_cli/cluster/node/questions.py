"""Questions that only an interpreter itself can answer: `python -c SOURCE QUESTION ARGUMENT...`.

The interpreter may have any environment from Python 3.8 on, so each question imports the third-party packages that it
needs itself. The answer is printed as one line of JSON.
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import importlib.util as util
import json
import os
import runpy
import sys
import time
from importlib import import_module
from typing import Any


def software(*packages: str) -> dict[str, Any]:
    """Return the versions of Python, Ray, rlinf and `packages`, and a digest of rlinf's code, without heavy imports."""
    digest = hashlib.sha256()
    places: dict[str, str] = {}
    for name in ("rlinf_core", "recipes"):
        roots = _roots(name)
        if roots:
            places[name] = roots[0]
        for root in roots:
            _add(digest, root)
    return {
        "python": list(sys.version_info[:3]),
        "ray": _version("ray") if _roots("ray") else None,
        "rlinf": _own_version(places.get("rlinf_core")),
        "fingerprint": digest.hexdigest()[:16] if "rlinf_core" in places else None,
        "places": places,
        "packages": {name: version for name in packages for version in (_version(name),) if version is not None},
    }


def recipe(asked: str) -> dict[str, Any]:
    """Return the entry point of `recipe: NAME`, and a digest of its package."""
    values = [point.value for point in _entry_points() if point.name == asked]
    value = asked if ":" in asked else values[0] if values else None
    digest = hashlib.sha256()
    if value:
        name = value.partition(":")[0].partition(".")[0]
        spec = util.find_spec(name)
        if spec is None:
            sys.exit(f"No module named {name!r}")
        for root in list(spec.submodule_search_locations or ()) or [spec.origin or ""]:
            _add(digest, root)
    return {"value": value, "digest": digest.hexdigest()[:16]}


def accelerators() -> dict[str, Any]:
    """Return the accelerators as a running job finds them."""
    from rlinf_core.hardware.accelerators import find_accelerators

    hardware = find_accelerators()
    return {"type": hardware.accelerator.name, "models": [device.model for device in hardware.devices]}


def cameras(make: str) -> list[str]:
    """Return the serial numbers of the attached cameras of a make; for others than realsense and zed, candidates."""
    if make == "realsense":
        rs: Any = import_module("pyrealsense2")
        return [device.get_info(rs.camera_info.serial_number) for device in rs.context().query_devices()]
    if make == "zed":
        sl: Any = import_module("pyzed.sl")
        return [str(device.serial_number) for device in sl.Camera.get_device_list()]
    # Names of links end in the serial number that a USB camera reports: `usb-MAKER_MODEL_SERIAL-video-index0`.
    end = "-video-index0"
    folder = "/dev/v4l/by-id"
    links = [name for name in os.listdir(folder) if name.endswith(end)] if os.path.isdir(folder) else []
    return sorted({part for link in links for part in link[: -len(end)].split("_")[1:]})


def members(address: str, wanted: str, seconds: str) -> dict[str, Any]:
    """Return the nodes and jobs that the head at `HOST:PORT` lists, once the ranks `wanted` (JSON) are alive, or at
    the latest after `seconds`."""
    connect: Any = import_module("ray._raylet").GcsClient
    end, client, fault = time.monotonic() + float(seconds), None, None
    nodes: list[dict[str, Any]] = []
    while True:
        try:
            client = client or connect(address=address)
            nodes = [_node(key, node) for key, node in client.get_all_node_info(timeout=5).items()]
            fault = None
        except Exception as error:  # noqa: BLE001 - any of Ray's errors; the caller decides
            fault = _first_line(error)
        alive = {node["rank"] for node in nodes if node["alive"]}
        if alive.issuperset(json.loads(wanted)) or time.monotonic() > end:
            break
        time.sleep(0.2)
    jobs: list[dict[str, Any]] = []
    if client is not None and fault is None:
        try:
            jobs = jobs_of(client)
        except Exception as error:  # noqa: BLE001 - likewise
            fault = _first_line(error)
    return {"nodes": nodes, "jobs": jobs, "fault": fault}


def jobs_of(client: Any) -> list[dict[str, Any]]:
    """Return the connected drivers that a client of the head lists."""
    return [
        {
            "id": key.hex() if hasattr(key, "hex") else str(key),
            "pid": job.driver_pid,
            "address": job.driver_ip_address,
            "command": job.entrypoint,
            "started": job.start_time / 1000,
        }
        for key, job in client.get_all_job_info(timeout=5).items()
        if not job.is_dead and not job.config.ray_namespace.startswith("_ray_internal")
    ]


def _node(key: Any, node: Any) -> dict[str, Any]:
    return {
        "address": node.node_manager_address,
        "rank": node.labels.get("rlinf.io/rank"),
        "id": key.hex(),
        "alive": node.state == 0,
        "reason": node.death_info.reason_message,
    }


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _own_version(place: str | None) -> str | None:
    # Not a distribution's version: synced code has no distribution, and another project's may be called `rlinf`.
    try:
        return runpy.run_path(os.path.join(place, "version.py"))["__version__"] if place else None
    except (OSError, KeyError):
        return None


def _entry_points() -> list[Any]:
    points: Any = metadata.entry_points()
    # Before Python 3.10, the entry points are a dictionary by group.
    return list(points.select(group="rlinf.recipes") if hasattr(points, "select") else points.get("rlinf.recipes", ()))


def _roots(name: str) -> list[str]:
    """Return the folders of an importable package; none if there is no such package."""
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return sorted(spec.submodule_search_locations or ()) if spec else []


def _add(digest: Any, root: str) -> None:
    """Add the Python files of a folder, or one file, to a digest."""
    files = [root] if os.path.isfile(root) else []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    for path in files:
        digest.update(os.path.relpath(path, root).encode() + b"\0")
        with open(path, "rb") as source:
            digest.update(source.read() + b"\0")


QUESTIONS = {function.__name__: function for function in (software, recipe, accelerators, cameras, members)}

if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[1]](*sys.argv[2:])))
