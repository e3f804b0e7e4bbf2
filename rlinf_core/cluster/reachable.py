"""Whether a driver can join the Ray at an address that somebody gave: asked before Ray is, which would try for minutes,
and end the whole process where it is no node."""

from __future__ import annotations

import os
import time
from typing import Final

from rlinf_core import env_vars
from rlinf_core.bootstrap import node_processes
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import ClusterError

_ANSWER_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 5
_ALIVE: Final = 0
_JOIN_SECONDS: Final = 5.0
_PAUSE: Final = 0.2


def check(address: str) -> None:
    """Makes sure that a head answers at `address`, and that this machine is a node of its cluster.

    Raises:
        ClusterError: it is no `HOST:PORT`, nothing answers there, or this machine is no node.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"`{address}` is no address of a cluster",
            help="give HOST:PORT as `ray start --head` said it, such as `10.0.0.1:6379`",
        )
    fault = node_processes.answers(host.strip("[]"), int(port), _ANSWER_SECONDS)
    if fault is not None:
        raise _silent(address, fault.strerror or str(fault))
    others = _until_here(address)
    if others is not None:
        raise ClusterError(
            f"this machine is not a node of the cluster at {address}",
            why="a driver has to run on one of its nodes",
            help=f"run the command on one of them: {', '.join(others)}" if others else "start Ray here: no node lives",
        )


def _until_here(address: str) -> list[str] | None:
    """None as soon as this machine is a living node, which may be about to join; else the addresses of those that are.

    Raises:
        ClusterError: the head does not tell.
    """
    ray = ray_api()
    begun = time.monotonic()
    try:
        client = ray._raylet.GcsClient(address=address)
        while True:
            found = client.get_all_node_info(timeout=_LIST_SECONDS).values()
            alive = [node for node in found if node.state == _ALIVE]
            if any(os.path.exists(node.raylet_socket_name) for node in alive):
                return None
            # A head comes before its own node. Where others live, this one is hardly ever just coming.
            patience = _JOIN_SECONDS if alive else env_vars.CONNECT_TIMEOUT.get()
            if time.monotonic() - begun > patience:
                return sorted(node.node_manager_address for node in alive)
            time.sleep(_PAUSE)
    except ray.exceptions.RayError as error:
        raise _silent(address, str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def _silent(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"the cluster at {address} does not answer",
        why=why,
        help="check that its head is up, that its port is open to this machine, and that the token is here"
        " (`RAY_AUTH_TOKEN_PATH`)",
    )
