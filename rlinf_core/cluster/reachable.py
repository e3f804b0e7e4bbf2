"""Whether a driver can join the Ray at an address that somebody gave: asked before Ray is, which would try for minutes,
and end the whole process where it is no node."""

from __future__ import annotations

import os
from typing import Final

from rlinf_core.bootstrap import node_processes
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.errors import ClusterError

_ANSWER_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 5
_ALIVE: Final = 0


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
    ray = ray_api()
    try:
        found = ray._raylet.GcsClient(address=address).get_all_node_info(timeout=_LIST_SECONDS).values()
    except ray.exceptions.RayError as error:
        raise _silent(address, str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    alive = [node for node in found if node.state == _ALIVE]
    if not any(os.path.exists(node.raylet_socket_name) for node in alive):
        listed = ", ".join(sorted(node.node_manager_address for node in alive))
        raise ClusterError(
            f"this machine is not a node of the cluster at {address}",
            why="a driver has to run on one of its nodes",
            help=f"run the command on one of them: {listed}" if listed else "none of its nodes lives: start Ray there",
        )


def _silent(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"the cluster at {address} does not answer",
        why=why,
        help="check that its head is up, that its port is open to this machine, and that the token is here"
        " (`RAY_AUTH_TOKEN_PATH`)",
    )
