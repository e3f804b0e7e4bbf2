"""A forked child of a process in a cluster: it is in none, and its end is nothing to its parent's.

It has a copy of Ray's memory, shares its connections, and has none of its threads. Whatever would say goodbye, free
what the cluster holds or wait for a thread disturbs the parent, or never returns.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

from rlinf_core.cluster.ray_private import ray_module


def let_go() -> None:
    """From now on Ray is in no cluster, in this child, and its handlers of the end do nothing."""
    worker: Any = ray_module("ray._private.worker")
    state: Any = ray_module("ray._private.state")
    store: Any = ray_module("ray.experimental.internal_kv")
    connected, node = worker.global_worker, worker._global_node
    # Never freed, also when the interpreter ends.
    for kept in (connected, connected.__dict__.get("core_worker"), node, state.state, store.global_gcs_client):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    atexit.unregister(worker.shutdown)
    if node is not None:
        # The handler that would end them is within a function of Ray.
        node.all_processes = {}
        worker._global_node = None
    connected.set_is_connected(False)
    connected.set_mode(None)
    # By it references and handles that are freed here would tell the parent's cluster so.
    connected.__dict__.pop("core_worker", None)
    _end_at_once()


def _end_at_once() -> None:
    """When the interpreter has ended, the child has, with its own status: destructors of Ray's library are not run."""
    libc = ctypes.CDLL(None)
    # Not everywhere; where it is, what is registered last comes first, and is called with the status.
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
