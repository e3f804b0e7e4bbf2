"""The parts of Ray that rlinf uses, without Ray's incomplete types; Ray is imported on first use.

No other module uses private parts, which are listed in `PARTS`, each with the reason. `tests/unit/cluster/test_ray.py`
checks that each exists in the installed Ray, and that no module bypasses the list.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import io
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, NamedTuple

from rlinf_core.errors import ClusterError
from rlinf_core.process import import_path


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


LOOPBACK: Final = "127.0.0.1"
_NODE_SECONDS, _LOOK_SECONDS = 30.0, 0.01
# The error message for Ray use outside of a cluster.
_absence = "this process is in no cluster"
# Joins the cluster of a forked process, on its first use of Ray.
_join: Callable[[Any], None] | None = None


@cache  # every group call needs it, on both sides
def ray_api() -> Any:
    """Return the module `ray`, with the submodules that rlinf uses. From now on Ray starts no cluster by itself."""
    ray = _imported()
    if _join is not None:
        _join(ray)
    return ray


def join_at_first_use(join: Callable[[Any], None]) -> None:
    """Make this process join its cluster on first use of Ray: `join` is called with the module."""
    global _join
    _join = join


def joins_at_first_use() -> bool:
    """Return whether `join_at_first_use` was called."""
    return _join is not None


@cache
def _imported() -> Any:
    import_module("ray.util.scheduling_strategies")
    automatic: Any = ray_module("ray._private.auto_init_hook")
    automatic.enable_auto_connect = False
    # Ray calls this before any operation that needs a cluster, and would report a missing `ray.init()`.
    automatic.auto_init_ray = _check_joined
    return import_module("ray")


def session_folder() -> str:
    """Return the session folder of this node's Ray."""
    node: Any = ray_module("ray._private.worker").global_worker.node
    return str(node.get_session_dir_path())


def set_absence(message: str) -> None:
    """Set the error message for Ray use outside of a cluster."""
    global _absence
    _absence = message


def no_cluster() -> ClusterError:
    """Return the error for Ray use outside of a cluster."""
    return ClusterError(_absence, help="make a `Cluster`, and launch groups in it")


def _check_joined() -> None:
    if not import_module("ray").is_initialized():
        raise no_cluster()


@contextmanager
def loopback_only() -> Generator[None, None, None]:
    """Make a Ray that is started or joined within the block use only `LOOPBACK`.

    Ray replaces a loopback address by the machine's own unless multi-node clusters are disabled, as on macOS. Its
    processes listen on every interface unless given a loopback address.
    """
    constants: Any = ray_module("ray._private.ray_constants")
    several = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = several


@contextmanager
def quick_start() -> Generator[None, None, None]:
    """Make a Ray that is started within the block skip its autoscaler and dashboard, and poll in short steps.

    No nodes join it, and its dashboard is off: the substitute that Ray starts only reports usage, which is also off,
    and delays the start by a second. By default Ray polls for its own node once a second.
    """
    node: Any = ray_module("ray._private.node").Node
    services: Any = ray_module("ray._private.services")
    monitor, server, get_node = node.start_monitor, node.start_api_server, services.get_node
    node.start_monitor = node.start_api_server = _start_nothing
    services.get_node = partial(_get_node_soon, get_node)
    try:
        yield
    finally:
        node.start_monitor, node.start_api_server, services.get_node = monitor, server, get_node


def _get_node_soon(get_node: Callable[[str, str], object], gcs_address: str, node_id: str) -> object:
    """Return Ray's description of a node, asked once the head lists the node; if asked earlier, Ray sleeps a second."""
    client = gcs_client(gcs_address)
    deadline = time.monotonic() + _NODE_SECONDS
    while time.monotonic() < deadline:
        if node_id in {key.hex() for key in client.get_all_node_info(timeout=_NODE_SECONDS)}:
            break
        time.sleep(_LOOK_SECONDS)
    return get_node(gcs_address, node_id)


def _start_nothing(*args: object, **kwargs: object) -> None:
    pass


class _OwnOrder(list[str]):
    """A list of folders that ignores `extend`."""

    def extend(self, values: object, /) -> None:
        """Leave the list as it is."""


def job_config() -> Any:
    """Return the `job_config` of `ray.init` with which workers import in the order of `import_path`; None for a driver
    that is a user's script, whose folder Ray puts first in workers, as Python does in the script.

    By default Ray appends the driver's working folder, which each worker puts before the standard library; there is no
    option against that. If rlinf itself is in the working folder, the folder stays.
    """
    if not import_path.is_managed():
        return None
    config: Any = ray_module("ray.job_config").JobConfig()
    here = os.path.realpath(os.getcwd())
    config._py_driver_sys_path = _OwnOrder([here] if here == import_path.OWN_ROOT else [])
    return config


def pickle_by_value(
    obj: object, keep: Callable[[Any], object] | None = None, reduce: Callable[[Any], Any] | None = None
) -> bytes:
    """Return the pickle of `obj`, with objects by value that cannot be imported elsewhere, such as classes of the
    driver's script.

    Args:
        keep: takes each buffer that stays outside of the stream; without `keep` none does.
        reduce: reduces some objects, as `reducer_override` of a pickler; returns `NotImplemented` for all others.
    """
    stream = io.BytesIO()
    pickler = _value_pickler()(stream, protocol=5, buffer_callback=keep)
    pickler.reduce = reduce
    pickler.dump(obj)
    return stream.getvalue()


@cache
def _value_pickler() -> Any:
    """Return the class of Ray's pickler, with `reduce` before its own reducers."""
    base: Any = _imported().cloudpickle.CloudPickler

    class ValuePickler(base):
        reduce: Callable[[Any], Any] | None

        def reducer_override(self, obj: Any) -> Any:
            reduced = NotImplemented if self.reduce is None else self.reduce(obj)
            return base.reducer_override(self, obj) if reduced is NotImplemented else reduced

    return ValuePickler


def gather(references: Sequence[Any]) -> asyncio.Future[list[Any]]:
    """Return the values of all references, or raise the first failure. The event loop is woken once, not for each."""
    loop = asyncio.get_running_loop()
    together: asyncio.Future[list[Any]] = loop.create_future()
    if not references:
        together.set_result([])
        return together
    answers: list[Future[Any]] = [reference.future() for reference in references]
    # Each answer pops one entry, on any thread of Ray: `pop` is atomic under the GIL.
    missing = deque(answers[1:])

    def notify(answer: Future[Any]) -> None:
        if together.done():
            return
        error = answer.exception()
        if error is not None:
            together.set_exception(error)
        else:
            together.set_result([answer.result() for answer in answers])

    def answered(answer: Future[Any]) -> None:
        if answer.exception() is None:
            with suppress(IndexError):
                missing.pop()
                return
        with suppress(RuntimeError):  # the loop is closed, so nothing waits
            loop.call_soon_threadsafe(notify, answer)

    for answer in answers:
        answer.add_done_callback(answered)
    return together
