"""Starting the embedded Ray of one machine, or joining one that runs.

A Ray that we start is private: its own folder, its own token, loopback only. Its guardian, of
`node/node_processes.py`, ends and removes what outlives the driver; what a guardian that was killed too leaves,
the next start removes.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.cluster import exit_status, ray_output, ray_private, reachable
from rlinf_core.cluster.driver_folder import new_folder
from rlinf_core.cluster.ray_api import LOOPBACK, job_config, loopback_only, quick_start, ray_api, set_absence
from rlinf_core.errors import ClusterError
from rlinf_core.failures import WorkerGroupError, followed
from rlinf_core.node import attach, node_facts
from rlinf_core.node.node_processes import MARK, guard
from rlinf_core.node.python_flags import refuse_stripped_docstrings
from rlinf_core.process.signal_mask import warnings_blocked

LOGGER = logging.getLogger("rlinf")


@dataclass(frozen=True, slots=True)
class RayEngine:
    """The Ray that this process is connected to.

    Attributes:
        address: of its GCS, as in `10.0.0.1:6379`.
        embedded: whether this process started it, and so ends it.
        folder: this process's private folder, or None where Ray was joined by other means than ours.
    """

    address: str
    embedded: bool
    folder: Path | None = None
    guardian: subprocess.Popen[bytes] | None = None


_engine: RayEngine | None = None
_ends: list[Callable[[], Sequence[WorkerGroupError]]] = []
# What the processes of embedded clusters prove to belong to us with; Ray reads it once, when it is first used.
_own_token: str | None = None
# Whether this process is a fork of one that was in a cluster.
_forked = False


def connect(address: str | None, namespace: str, *, may_start: bool, num_nodes: int | None = None) -> RayEngine:
    """Join the Ray at `address`, or the one this process is connected to already, or start one when there is none.

    See `attach.destination`.

    Raises:
        ClusterError: no cluster is known and none may be started, several are, or the one at `address` does not answer.
    """
    global _engine
    if _forked:
        raise ClusterError(
            "this process is a fork of one in a cluster, and cannot be in one itself",
            why="of Ray and of its connections only their memory was copied",
            help='start it anew instead, as `multiprocessing.get_context("spawn")` does, or fork before the `Cluster`',
        )
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - so it is where a shell closed it
        raise ClusterError(
            "Ray does not start in a process whose standard error is closed",
            help="redirect it instead, as by `2>/dev/null`",
        )
    ray_output.keep_plain()
    # Not imported here: an embedded Ray is told how to authenticate before it is.
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        if _engine is None:
            _engine = RayEngine(str(ray.get_runtime_context().gcs_address), embedded=False)
        return _engine
    found = attach.destination(address, num_nodes, may_start=may_start)
    if found is None:
        _engine = _start(namespace)
    else:
        known, other = (found, found.address) if isinstance(found, attach.Known) else (None, found)
        _authenticate(known)
        _engine = _join(other, namespace, on_loopback=reachable.check(other) == LOOPBACK)
    return _engine


def current() -> RayEngine | None:
    """Return the Ray that this process is connected to, if it is."""
    return _engine


def on_disconnect(end: Callable[[], Sequence[WorkerGroupError]]) -> None:
    """Before this process leaves its cluster, `end` is called, and returns the failures that nobody has seen.

    Who registered last is called first; registering again changes nothing.
    """
    if end not in _ends:
        _ends.append(end)


def end_all() -> list[WorkerGroupError]:
    """Call what `on_disconnect` registered, and return the failures of the job that nobody has seen."""
    return [error for end in reversed(_ends) for error in end()]


def disconnect() -> list[WorkerGroupError]:
    """Leave the cluster; an embedded Ray ends, and its folder goes. Safe to call twice.

    Returns:
        The failures of the job that nobody has seen.
    """
    global _engine
    if _forked:
        return []
    engine, _engine = _engine, None
    unseen = end_all() if engine is not None else []
    if engine and engine.embedded and engine.folder:
        ray_output.show_the_rest(engine.folder)
    with exit_status.kept_handler() if engine is not None else nullcontext():
        ray_api().shutdown()
    if engine is not None:
        set_absence("the cluster was shut down")
    if engine and engine.guardian:
        engine.guardian.communicate()
    elif engine and engine.folder:
        shutil.rmtree(engine.folder, ignore_errors=True)
    return unseen


def _disconnect_at_exit() -> None:
    for error in sorted(disconnect(), key=followed):
        exit_status.end_with_failure()
        LOGGER.error(
            "a call failed, and nobody waited for it:\n%s", "".join(traceback.format_exception(error)).rstrip()
        )


def _after_fork() -> None:
    """Leave the parent's cluster in a forked child, without a word."""
    global _engine, _forked
    engine, _engine = _engine, None
    if engine is None:
        return
    _forked = True
    _ends.clear()
    set_absence("this process is a fork of one in a cluster, and in none itself")
    atexit.unregister(_disconnect_at_exit)
    ray_private.let_go()
    if engine.guardian is not None and engine.guardian.stdin is not None:
        # It ends when nobody holds this any more: a child may outlive its parent.
        engine.guardian.stdin.close()


os.register_at_fork(after_in_child=_after_fork)


def _join(address: str, namespace: str, *, on_loopback: bool = False) -> RayEngine:
    ray = ray_api()
    try:
        # Ray takes the loopback address of a head for one of this machine's others, at which an embedded one is not.
        with exit_status.own_signals(), loopback_only() if on_loopback else nullcontext():
            ray.init(address=address, namespace=namespace, **_options())
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(
            f"the cluster at {address} does not answer",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="check that its head is up and that this machine has its token (`RAY_AUTH_TOKEN_PATH`)",
        ) from None
    # An interpreter that ends without `disconnect` leaves the folder to us.
    atexit.register(_disconnect_at_exit)
    return RayEngine(address, embedded=False, folder=new_folder())


def _authenticate(cluster: attach.Known | None) -> None:
    """Have this process's Ray prove the token of the cluster that it joins."""
    global _own_token
    attach.prepare(cluster)
    if cluster is not None and cluster.token_path:
        # Ray keeps it: an embedded Ray that this process starts later has the same.
        _own_token = Path(cluster.token_path).read_text(encoding="ascii").strip()


def _start(namespace: str) -> RayEngine:
    refuse_stripped_docstrings()
    folder = new_folder()
    _set_up_authentication(folder)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ[MARK] = str(folder)
    with warnings_blocked():
        guardian = guard(str(folder))
    ray = ray_api()
    try:
        with warnings_blocked(), exit_status.own_signals(), loopback_only(), quick_start():
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                object_store_memory=node_facts.object_store_bytes(),
                _temp_dir=str(folder),
                _node_ip_address=LOOPBACK,
                **_options(),
            )
    except Exception as error:
        # Ray has no type of its own for it; its message names the process that did not come.
        raise ClusterError(
            "Ray does not start on this machine",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="a machine that is very busy or short of memory takes longer than Ray waits: try again when it is not",
        ) from error
    # An interpreter that ends without `disconnect` leaves its Ray to Ray's own exit handler, and the folder to us.
    atexit.register(_disconnect_at_exit)
    return RayEngine(str(ray.get_runtime_context().gcs_address), embedded=True, folder=folder, guardian=guardian)


def _set_up_authentication(folder: Path) -> None:
    """Give an embedded Ray a token of our own, unless the environment switches authentication off or Ray has been
    imported already: it reads the mode once, when it is imported."""
    global _own_token
    if _own_token is None:
        if "ray" in sys.modules or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            attach.prepare(None)
            return
        _own_token = secrets.token_hex(32)
    # A second cluster of this process has another folder, and the token that Ray knows from the first.
    os.environ.update(node_facts.ray_environment(str(folder), str(folder), _own_token))


def _options() -> dict[str, Any]:
    ray_output.take_over()
    return {"logging_level": logging.ERROR, "log_to_driver": True, "job_config": job_config()}
