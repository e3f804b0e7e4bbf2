"""Starting an embedded Ray on this machine, or joining a running Ray; and the private folders of this user's drivers.

An embedded Ray is private: its own folder, its own token, loopback only. Its guardian (`process/proc.py`) ends the
processes that outlive the driver, and removes the folder; if the guardian is killed, too, the next start cleans up.
The folder also has the record of the running job.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from pydantic import TypeAdapter

from rlinf_core.cluster import ray_process
from rlinf_core.cluster.ray_api import (
    LOOPBACK,
    ended_processes,
    job_config,
    joins_at_first_use,
    let_go,
    loopback_only,
    quick_start,
    ray_api,
    set_absence,
)
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import ClusterError, ProcessEnd, RayStartError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError, followed
from rlinf_core.foreign.files import read_json_object
from rlinf_core.node import attach, node_facts
from rlinf_core.node.node_facts import make_private, private_base
from rlinf_core.node.own_process import refuse_stripped_docstrings
from rlinf_core.node.process_life import Presence, ProcessIdentity, look, own_identity
from rlinf_core.process.proc import MARK, boot_id, guard, reap, warnings_blocked

_OWNER_FILE = "owner"
_JOB_FILE = "job"
_OWNER = TypeAdapter(ProcessIdentity)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The longest TMPDIR that leaves room for the paths of Ray's sockets.
_LONGEST_TMPDIR = 16


def new_folder() -> Path:
    """Return a new private folder for this process; remove those of dead processes."""
    base = base_folder()
    for folder in base.iterdir():
        if is_left_behind(folder):
            reap(str(folder))
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # Left open on purpose: the lock ends with the process, and is visible from containers that share the folder.
    fcntl.flock(os.open(folder, _FOLDER), fcntl.LOCK_EX)
    # Atomically and last, so that another starting process does not remove the folder as left behind.
    node_facts.write_private(str(folder / _OWNER_FILE), json.dumps(own_identity()._asdict()))
    return folder


def is_left_behind(folder: Path) -> bool:
    """Return whether the process that made the folder is certainly gone.

    It is if its lock is free, and the process either belongs to the current boot or has verifiably ended.
    """
    owner = _owner(folder)
    if owner is None:
        return False
    try:
        lock = os.open(folder, _FOLDER)
        written = (folder / _OWNER_FILE).stat().st_mtime
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    presence = look(owner, written)
    return presence is Presence.GONE or (presence is Presence.UNKNOWN and bool(owner.boot) and owner.boot == boot_id())


def base_folder() -> Path:
    """Return the folder that holds the private folders of drivers.

    Raises:
        ClusterError: it cannot be made, or is not private to this user.
    """
    base = Path(private_base())
    try:
        private = make_private(str(base))
    except OSError as error:
        raise ClusterError(
            f"`{base}` cannot be used",
            why=error.strerror,
            help=f"set TMPDIR to your own folder with at most {_LONGEST_TMPDIR} characters, for Ray's sockets",
        ) from None
    if not private:
        raise ClusterError(
            f"`{base}` is not a private folder of yours", help="remove it, or set TMPDIR to your own folder"
        )
    return base


def is_owned(folder: Path) -> bool:
    """Return whether the process that made the folder is alive and visible."""
    owner = _owner(folder)
    return owner is not None and look(owner) is Presence.ALIVE


def folders_of(process: ProcessIdentity) -> list[Path]:
    """Return the private folders of a driver on this machine, one for each Ray that it uses."""
    return [folder for folder in base_folder().iterdir() if _owner(folder) == process]


def _owner(folder: Path) -> ProcessIdentity | None:
    try:
        return _OWNER.validate_python(read_json_object(folder / _OWNER_FILE, 1 << 16), strict=True)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record of a running job: its secret in hex, its start in seconds since 1970, and the `pid` of its driver."""

    job: str
    secret: str = field(repr=False)
    manager: EndpointInfo
    address: str
    pid: int
    started: float

    def write(self, folder: Path) -> None:
        """Write the record to the driver's private folder, readable by its user only."""
        node_facts.write_private(str(folder / _JOB_FILE), json.dumps(asdict(self)))


def running_jobs() -> list[JobRecord]:
    """Return the jobs of this user's drivers on this machine, newest first."""
    return sorted(_records(), key=lambda record: -record.started)


def _records() -> Iterator[JobRecord]:
    for folder in base_folder().iterdir():
        if not is_owned(folder):
            continue
        try:
            data = read_json_object(folder / _JOB_FILE)
            manager = EndpointInfo(**data.pop("manager"))
            yield JobRecord(manager=manager, **data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its driver has not launched anything yet, or runs another version


LOGGER = logging.getLogger("rlinf")


@dataclass(frozen=True, slots=True)
class RayEngine:
    """The Ray that this process is connected to.

    Attributes:
        address: the address of its GCS, for example `10.0.0.1:6379`.
        embedded: whether this process started it, and so ends it.
        folder: this process's private folder, or None if Ray was joined by other means.
        guardian: the process that ends an embedded Ray if this process does not.
    """

    address: str
    embedded: bool
    folder: Path | None = None
    guardian: subprocess.Popen[bytes] | None = None


_engine: RayEngine | None = None
_ends: list[Callable[[], Sequence[WorkerGroupError]]] = []
# The token that this process's Ray uses: Ray reads it once, at first use.
_own_token: str | None = None
# The processes of Ray without which a job cannot continue.
_NEEDED = ("gcs_server", "raylet")
# Whether this process was forked from one in a cluster.
_forked = False


def connect(address: str | None, namespace: str, *, may_start: bool, num_nodes: int | None = None) -> RayEngine:
    """Return the Ray that this process is connected to, else join or start the one that `attach.destination` selects.

    Raises:
        ClusterError: no cluster is known and none may be started, several are known, the cluster does not answer, this
            process cannot join one, or it is already in another than the one at `address`.
    """
    global _engine
    if _forked:
        raise ClusterError(
            "this process was forked from one in a cluster, and cannot join one itself",
            why="a fork copies the memory of Ray and its connections, but not their threads",
            help='start a new process instead, as `multiprocessing.get_context("spawn")` does, or fork before'
            " making the `Cluster`",
        )
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - so it is where a shell closed it
        raise ClusterError(
            "Ray does not start in a process whose standard error is closed",
            help="redirect it instead, as with `2>/dev/null`",
        )
    ray_process.keep_plain()
    # Do not import Ray yet: the authentication of an embedded Ray must be configured first.
    ray = ray_api() if joins_at_first_use() else sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        if _engine is None:
            _engine = RayEngine(str(ray.get_runtime_context().gcs_address), embedded=False)
        if address and not _is_at(_engine, address):
            raise ClusterError(
                f"this process is already in the cluster at {_engine.address}, not in `{address}`",
                help="leave it first by `cluster.shutdown()`, or name no address",
            )
        return _engine
    cluster = attach.destination(address, num_nodes, may_start=may_start)
    if cluster is None:
        _engine = _start(namespace)
    else:
        cluster_found, other = (cluster, cluster.address) if isinstance(cluster, attach.Known) else (None, cluster)
        _authenticate(cluster_found)
        _engine = _join(other, namespace, on_loopback=ray_process.check(other) == LOOPBACK)
    return _engine


def _is_at(engine: RayEngine, address: str) -> bool:
    return engine.embedded if address == attach.LOCAL else attach.is_same_head(engine.address, address)


def current() -> RayEngine | None:
    """Return the Ray that this process is connected to, if any."""
    return _engine


def on_disconnect(end: Callable[[], Sequence[WorkerGroupError]]) -> None:
    """Register `end`, called before this process leaves its cluster; it returns failures that were never reported.

    The last registered is called first; registering twice has no effect.
    """
    if end not in _ends:
        _ends.append(end)


def end_all() -> list[WorkerGroupError]:
    """Call the functions registered by `on_disconnect`; return the job's failures that were never reported."""
    return [error for end in reversed(_ends) for error in end()]


def disconnect() -> list[WorkerGroupError]:
    """Leave the cluster; an embedded Ray is shut down, and its folder removed. Idempotent.

    Returns:
        The job's failures that were never reported.
    """
    global _engine
    if _forked:
        return []
    engine, _engine = _engine, None
    unseen = end_all() if engine is not None else []
    if engine and engine.embedded and engine.folder:
        ray_process.show_the_rest(engine.folder)
    with ray_process.kept_handler() if engine is not None else nullcontext():
        ray_api().shutdown()
    if engine is not None:
        set_absence("the cluster was shut down")
    if engine and engine.guardian:
        engine.guardian.communicate()
    elif engine and engine.folder:
        shutil.rmtree(engine.folder, ignore_errors=True)
    return unseen


def fallen() -> WorkerDiedError | None:
    """Return the death of a process of this driver's embedded Ray on which all workers depend; None while all live.

    Without its `gcs_server`, Ray itself continues for a minute, and then ends the driver.
    """
    if _engine is None or not _engine.embedded:
        return None
    ended = [(kind, status) for kind, status in ended_processes() if kind in _NEEDED]
    if not ended:
        return None
    kind, status = ended[0]
    end = ProcessEnd(Signals(-status).name, None, None) if status < 0 else ProcessEnd(None, status, None)
    return WorkerDiedError(kind, node="this machine", cause=f"{end.words}; it is a part of Ray", end=end)


def join_late(ray: Any, address: str, namespace: str) -> None:
    """Join the Ray at `address` in a forked process, which inherits its authentication."""
    on_loopback = address.startswith(f"{LOOPBACK}:")
    with ray_process.own_signals(), loopback_only() if on_loopback else nullcontext():
        ray.init(
            address=address,
            namespace=namespace,
            logging_level=logging.ERROR,
            log_to_driver=False,
            job_config=job_config(),
        )


def _disconnect_at_exit() -> None:
    for error in sorted(disconnect(), key=followed):
        ray_process.end_with_failure()
        LOGGER.error(
            "a call failed, and its result was never read:\n%s", "".join(traceback.format_exception(error)).rstrip()
        )


def _after_fork() -> None:
    """Leave the parent's cluster in a forked child, without notifying it."""
    global _engine, _forked
    engine, _engine = _engine, None
    if engine is None:
        return
    _forked = True
    _ends.clear()
    set_absence("this process was forked from one in a cluster, and is in none itself")
    atexit.unregister(_disconnect_at_exit)
    let_go()
    if engine.guardian is not None and engine.guardian.stdin is not None:
        # The guardian ends when all copies of this pipe are closed: a child may outlive its parent.
        engine.guardian.stdin.close()


os.register_at_fork(after_in_child=_after_fork)


def _join(address: str, namespace: str, *, on_loopback: bool = False) -> RayEngine:
    ray = ray_api()
    try:
        # Ray would replace the loopback address of a head by another one of this machine, where it does not listen.
        with ray_process.own_signals(), loopback_only() if on_loopback else nullcontext():
            ray.init(address=address, namespace=namespace, **_options())
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(
            f"the cluster at {address} does not answer",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="check that its head is up and that this machine has its token (`RAY_AUTH_TOKEN_PATH`)",
        ) from None
    # If the interpreter exits without `disconnect`, the folder is removed here.
    atexit.register(_disconnect_at_exit)
    return RayEngine(address, embedded=False, folder=new_folder())


def _authenticate(cluster: attach.Known | None) -> None:
    """Configure this process's Ray with the token of the cluster that it joins."""
    global _own_token
    attach.prepare(cluster)
    if cluster is not None and cluster.token_path:
        # Ray caches the token: an embedded Ray that this process starts later must use the same.
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
        with warnings_blocked(), ray_process.own_signals(), loopback_only(), quick_start():
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
        # Ray has no exception type for this; the message names the process that did not start.
        raise RayStartError(
            "Ray does not start on this machine",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="a machine that is very busy or short of memory exceeds Ray's time limit: try again later",
        ) from error
    # If the interpreter exits without `disconnect`, Ray's exit handler ends Ray, and the folder is removed here.
    atexit.register(_disconnect_at_exit)
    return RayEngine(str(ray.get_runtime_context().gcs_address), embedded=True, folder=folder, guardian=guardian)


def _set_up_authentication(folder: Path) -> None:
    """Give an embedded Ray its own token, unless the environment disables authentication or Ray was imported before:
    Ray reads the mode once, on import."""
    global _own_token
    if _own_token is None:
        if "ray" in sys.modules or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            attach.prepare(None)
            return
        _own_token = secrets.token_hex(32)
    # A second Ray of this process has another folder, but the token that Ray cached for the first.
    os.environ.update(node_facts.ray_environment(str(folder), str(folder), _own_token))


def _options() -> dict[str, Any]:
    ray_process.take_over()
    return {"logging_level": logging.ERROR, "log_to_driver": True, "job_config": job_config()}
