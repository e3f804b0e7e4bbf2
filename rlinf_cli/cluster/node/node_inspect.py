"""Facts about a node that only `doctor` needs: accelerators, robots, cameras, limits.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.node.node_probe import ask_interpreter
from rlinf_core.node.node_env import merged

_ROBOT_SECONDS = 3.0


def inspect(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node.

    Args:
        request: the request, as of `probe`; `addresses` of robots as host and port, `cameras` the makes to look for and
            `camera_environment` the interpreter that does, `recipe` as the file names it, or None, `environments` the
            other interpreters of the node, as `node_env` reads them.
    """
    env, name = node_probe.environment(request), request.get("recipe")
    cameras_by: dict[str, Any] = request.get("camera_environment") or {
        "interpreter": sys.executable,
        "env": {},
        "prepended": (),
    }
    cameras_env = merged(env, cameras_by["env"], cameras_by["prepended"])
    with ThreadPoolExecutor(8) as pool:
        accelerators = pool.submit(ask_interpreter, env, "accelerators")
        cameras = {
            make: pool.submit(ask_interpreter, cameras_env, "cameras", make, interpreter=cameras_by["interpreter"])
            for make in request.get("cameras", ())
        }
        recipe = pool.submit(recipe_of, name, env) if name else None
        others = [pool.submit(_software, other, env, request) for other in request.get("environments", ())]
        addresses = [tuple(address) for address in request.get("addresses", ())]
        robots = list(pool.map(_reach, addresses, [cameras_env] * len(addresses)))
        common = node_probe.probe(request)
    now = time.time()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        **common,
        # Taken now: the caller knows when it sent the request and received the reply.
        "time": now,
        "accelerators": accelerators.result(),
        "cameras": {make: future.result() for make, future in cameras.items()},
        "robots": robots,
        "recipe": recipe.result() if recipe is not None else None,
        "environments": [future.result() for future in others],
        "files_soft": soft,
        "files_hard": hard,
        "memory": _memory(),
        "ephemeral": _ephemeral(),
        "shm_total": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
    }


def try_out(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial program in the environment of a group's processes.

    Args:
        request: the request, as of `probe`; `module` and `arguments` of the program, `seconds` that it may take, and
            `environment`, as `node_env` reads it; None: that of the node.

    Returns:
        `{"found": ...}`, the record that it printed, or `{"fault": "..."}`.
    """
    env, declared = node_probe.environment(request), request.get("environment")
    interpreter = sys.executable
    if declared is not None:
        env, interpreter = merged(env, declared["env"], declared["prepended"]), declared["interpreter"]
    code = "import runpy; runpy.run_module({!r}, run_name='__main__')\n".format(request["module"])
    return node_probe.run_code(code, env, interpreter, float(request["seconds"]), *request["arguments"])


def _software(declared: dict[str, Any], own: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of another interpreter of the node, in its given environment."""
    env, interpreter = merged(own, declared["env"], declared["prepended"]), declared["interpreter"]
    facts, recipe = node_probe.software(env, interpreter, request.get("packages", ())), request.get("recipe")
    return {**facts, "recipe": recipe_of(recipe, env, interpreter) if recipe and "fault" not in facts else None}


def recipe_of(name: str, env: dict[str, str], interpreter: str = sys.executable) -> dict[str, Any]:
    """Return the entry point of a recipe in an interpreter, and a digest of its package: `{"found": ...}` or `{"fault":
    "..."}`.
    """
    return ask_interpreter(env, "recipe", name, interpreter=interpreter)


def _reach(address: tuple[str, int], env: Mapping[str, str]) -> list[Any]:
    """Return [host, port, None or the connection error]; a host `$NAME` is a variable of `env`."""
    host, port = address
    meant = env.get(host[1:]) if host.startswith("$") else host
    if not meant:
        return [host, port, f"the node's environment has no variable `{host[1:]}`"]
    try:
        with socket.create_connection((meant, port), timeout=_ROBOT_SECONDS):
            return [host, port, None]
    except socket.timeout:  # noqa: UP041 - one and the same only from 3.10 on
        return [host, port, f"no answer within {_ROBOT_SECONDS:g} s"]
    except OSError as error:
        return [host, port, (error.strerror or str(error)).lower()]


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _ephemeral() -> list[int]:
    """Return the first and last ephemeral port of the system."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = file.read().split()
    except (OSError, ValueError):
        return []
    return [int(first), int(last)]
