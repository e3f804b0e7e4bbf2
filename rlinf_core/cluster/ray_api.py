"""Ray's functions without Ray's incomplete types; Ray is imported on first use."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

from rlinf_core.cluster.ray_private import gcs_client, ray_module
from rlinf_core.errors import ClusterError
from rlinf_core.process import import_path

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
