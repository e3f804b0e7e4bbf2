"""The private parts of Ray that rlinf uses, each with the reason.

No other module uses private parts. `tests/unit/cluster/test_ray.py` checks that each part exists in the
installed Ray, and that no module bypasses this list.
"""

from __future__ import annotations

import atexit
import ctypes
from importlib import import_module
from typing import Any, Final, NamedTuple


class PrivatePart(NamedTuple):
    """The private parts of a module of Ray that are in use, as dotted paths, and why no public API serves."""

    module: str
    names: tuple[str, ...]
    reason: str


PARTS: Final = (
    PrivatePart(
        "ray._raylet",
        ("GcsClient", "InnerGcsClient.get_all_node_info", "InnerGcsClient.get_all_job_info"),
        "asking a head before `ray.init`, which tries for minutes; the public state API needs a dashboard",
    ),
    PrivatePart(
        "ray._private.auto_init_hook",
        ("enable_auto_connect", "auto_init_ray"),
        "a call of Ray outside of a cluster would start one; the variable for it is read before rlinf is imported",
    ),
    PrivatePart(
        "ray._private.worker",
        (
            "global_worker",
            "global_worker.set_is_connected",
            "global_worker.set_mode",
            "connect",
            "_global_node",
            "shutdown",
            "print_to_stdstream",
        ),
        "the folder of the node's session, the lines that workers print, letting go of Ray after a fork, and the moment"
        " at which native code handles SIGTERM",
    ),
    PrivatePart("ray._private.state", ("state",), "letting go of Ray after a fork: its connection must not be freed"),
    PrivatePart(
        "ray.experimental.internal_kv",
        ("global_gcs_client",),
        "letting go of Ray after a fork: its client must not be freed",
    ),
    PrivatePart(
        "ray._private.ray_constants",
        ("ENABLE_RAY_CLUSTER",),
        "Ray puts the machine's own address in the place of a loopback one unless this is off, and listens everywhere",
    ),
    PrivatePart(
        "ray._private.node",
        ("Node.start_monitor", "Node.start_api_server"),
        "an embedded Ray needs neither autoscaler nor dashboard, and waits for both without an option against it",
    ),
    PrivatePart(
        "ray._private.services",
        ("get_node",),
        "an embedded Ray asks for its own node once a second, which nothing sets",
    ),
    PrivatePart(
        "ray._private.utils", ("set_sigterm_handler",), "Ray would end the driver with a crash report at SIGTERM"
    ),
    PrivatePart(
        "ray.job_config",
        ("JobConfig",),
        "`_py_driver_sys_path`: workers would import from the driver's working folder before the standard library",
    ),
)
_MODULES: Final = frozenset(part.module for part in PARTS)


def ray_module(name: str) -> Any:
    """Return a module of `PARTS`.

    Raises:
        KeyError: the module is not listed there.
    """
    if name not in _MODULES:
        raise KeyError(name)
    return import_module(name)


def gcs_client(address: str) -> Any:
    """Return a client of the head at `HOST:PORT`, which connects without `ray.init`."""
    return ray_module("ray._raylet").GcsClient(address=address)


def ended_processes() -> list[tuple[str, int]]:
    """Return the ended processes of this driver's own Ray, with their exit statuses as `Popen` reports them."""
    node: Any = ray_module("ray._private.worker")._global_node
    if node is None:
        return []
    processes = ((kind, info.process.poll()) for kind, infos in node.all_processes.items() for info in infos)
    return [(kind, status) for kind, status in processes if status is not None]


def let_go() -> None:
    """Detach Ray from its cluster in this forked child, and disable its exit handlers."""
    worker: Any = ray_module("ray._private.worker")
    state: Any = ray_module("ray._private.state")
    store: Any = ray_module("ray.experimental.internal_kv")
    connected, node = worker.global_worker, worker._global_node
    # These objects must never be freed, not even at interpreter exit.
    for kept in (connected, connected.__dict__.get("core_worker"), node, state.state, store.global_gcs_client):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    atexit.unregister(worker.shutdown)
    if node is not None:
        # The exit handler that would end these processes cannot be unregistered: it is local to a function of Ray.
        node.all_processes = {}
        worker._global_node = None
    connected.set_is_connected(False)
    connected.set_mode(None)
    # Otherwise references and handles freed here would notify the parent's cluster.
    connected.__dict__.pop("core_worker", None)
    _end_at_once()


def _end_at_once() -> None:
    """Make the child exit with its own status at the end of the interpreter, without destructors of Ray's library."""
    libc = ctypes.CDLL(None)
    # `on_exit` is not available everywhere; its last registered handler is called first, with the status.
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
