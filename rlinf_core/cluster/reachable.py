"""A check that a driver can join the Ray at an address, before Ray tries: that would take minutes, and kill the process
if this machine is not a node."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from rlinf_core import env_vars
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.cluster.ray_private import gcs_client
from rlinf_core.errors import ClusterError

_ANSWER_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 5
_ALIVE: Final = 0
# A head speaks gRPC, so every connection begins with an HTTP/2 SETTINGS frame in both directions, here an empty one.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES: Final = 9
_FRAME_TYPE, _SETTINGS = 3, 4
_JOIN_SECONDS: Final = 5.0
_PAUSE: Final = 0.2


def check(address: str) -> str:
    """Check that a head answers at `address`, and return the address of this machine's node in its cluster.

    Raises:
        ClusterError: it is not `HOST:PORT`, no head answers there, or this machine is not a node.
    """
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"`{address}` is not the address of a cluster",
            help="give HOST:PORT as printed by `ray start --head`, such as `10.0.0.1:6379`",
        )
    _check_head(address, host.strip("[]"), int(port))
    own, others = _until_here(address)
    if own is None:
        raise ClusterError(
            f"this machine is not a node of the cluster at {address}",
            why="a driver must run on one of its nodes",
            help=f"run the command on one of its nodes: {', '.join(others)}"
            if others
            else "start Ray here: no node is alive",
        )
    return own


def _check_head(address: str, host: str, port: int) -> None:
    seconds = env_vars.CONNECT_TIMEOUT.get()
    try:
        with socket.create_connection((host, port), timeout=min(_ANSWER_SECONDS, seconds)) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            answer = _first_bytes(connection, time.monotonic() + seconds)
    except (OSError, OverflowError) as error:
        raise _silent(address, getattr(error, "strerror", None) or str(error)) from None
    if len(answer) < _FRAME_HEADER_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        what = "does not speak gRPC" if answer else f"sent nothing within {seconds:g} s, or closed the connection"
        raise _silent(address, f"the listener there is not a Ray head: it {what}")


def _first_bytes(connection: socket.socket, deadline: float) -> bytes:
    """Return the first bytes that identify the other side; fewer if it sends no more by the deadline."""
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < _FRAME_HEADER_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(_FRAME_HEADER_BYTES - len(answer))
            if not chunk:
                break
            answer += chunk
    except (TimeoutError, ConnectionError):
        pass
    return answer


def _until_here(address: str) -> tuple[str | None, list[str]]:
    """Return the address of this machine's living node, which may be about to join, and those of all living nodes.

    Raises:
        ClusterError: the head does not answer.
    """
    ray = ray_api()
    begun = time.monotonic()
    try:
        client = gcs_client(address)
        while True:
            listed = client.get_all_node_info(timeout=_LIST_SECONDS).values()
            alive = [node for node in listed if node.state == _ALIVE]
            own = next((node for node in alive if os.path.exists(node.raylet_socket_name)), None)
            # A head starts before its own node. If other nodes are alive, this one is hardly still joining.
            patience = _JOIN_SECONDS if alive else env_vars.CONNECT_TIMEOUT.get()
            if own is not None or time.monotonic() - begun > patience:
                address_of_own = None if own is None else str(own.node_manager_address)
                return address_of_own, sorted(node.node_manager_address for node in alive)
            time.sleep(_PAUSE)
    except ray.exceptions.RayError as error:
        if "InvalidAuthToken" in str(error):
            raise _unauthenticated(address) from None
        raise _silent(address, str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def _unauthenticated(address: str) -> ClusterError:
    has_one = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return ClusterError(
        f"the cluster at {address} rejects this process",
        why="its token differs from the one here" if has_one else "it requires a token, and none is known here",
        help="`rlinf up` keeps a cluster's token in `~/.local/state/rlinf/clusters/NAME.token` of the machine where it"
        " ran: copy that file (mode 0600) and set `RAY_AUTH_TOKEN_PATH` to it",
    )


def _silent(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"the cluster at {address} does not answer",
        why=why,
        help="check that its head is up, that its port is open to this machine, and that the token is here"
        " (`RAY_AUTH_TOKEN_PATH`)",
    )
