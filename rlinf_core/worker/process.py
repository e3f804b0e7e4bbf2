"""The process of a user's worker: an actor of Ray, or a forked process (see `process_host`).

Ray sees only this class. The user's class arrives pickled and is imported after ranks and devices are set in the
environment, so that modules that read them, or initialize CUDA, on import see the right ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import logging
import os
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import cache
from types import AsyncGeneratorType, GeneratorType
from typing import Any, TypeVar

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster.membership import free_port
from rlinf_core.cluster.ray_api import pickle_by_value, ray_api
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint_info import EndpointInfo, advertised_on
from rlinf_core.context import WorkerContext, enter_session
from rlinf_core.errors import CancelledOperationError, MismatchError, PayloadError
from rlinf_core.failures import PackedError
from rlinf_core.hardware.accelerators import get_accelerator
from rlinf_core.node import device_claims, stacks
from rlinf_core.process import activity, pacing
from rlinf_core.process.import_path import add_user_folders, add_working_folder
from rlinf_core.process.proc import Peak, PeakMeter
from rlinf_core.supervision.client import ManagerClient, enter_job
from rlinf_core.waiting import OperationKind
from rlinf_core.worker.calls import MethodCall, RemoteFailure, Timed, check_call, current_call, unanswered, whole
from rlinf_core.worker.debugging import Profile, enter_breakpoints, set_up_logging, start_profile
from rlinf_core.worker.timer import CallRecord, call_records, recording

T = TypeVar("T")

# The most cancelled calls that are remembered: more than a cancelling caller leaves on one worker.
_CANCELLED_KEPT = 4096


class CurrentTask(threading.local):
    """The call that the current thread of a forked process answers; replaces Ray's runtime context."""

    name = ""
    serial = ""

    def get_task_name(self) -> str:
        """Return the name of the worker's method."""
        return self.name

    def get_task_id(self) -> str:
        """Return Ray's id of the call."""
        return self.serial


class WorkerProcess:
    """One process of a worker group. Methods run one after another on the process's main thread.

    Args:
        name: the address of the worker that will live in it.
        task: the source of the current call; by default Ray's runtime context.
    """

    def __init__(self, name: str, task: CurrentTask | None = None) -> None:
        self._name = name
        self._task: CurrentTask = ray_api().get_runtime_context() if task is None else task
        self._worker: Any = None
        self._context: WorkerContext | None = None
        self._client: ManagerClient | None = None
        self._calls: dict[str, MethodCall] = {}
        # Calls cancelled by their callers, oldest first. Calls that had returned before stay, so the number is limited.
        self._cancelled: dict[str, Exception] = {}
        self._memory = PeakMeter()
        self._profile: Profile | None = None
        # The error of further calls during the group's shutdown.
        self._dismissed: Exception | None = None

    def __repr__(self) -> str:
        """Return the prefix that Ray gives to lines of this process; Ray asks once, at its start."""
        return self._name

    def find_port(self) -> int:
        return free_port()

    def construct(self, context: WorkerContext, manager: EndpointInfo, pickled: bytes, master_port: int) -> int:
        """Construct the worker; return the pid. `pickled` holds its class and the arguments of its constructor.

        `master_port` is the port of the group's `torch.distributed` rendezvous, on `context.master_addr`.

        Raises:
            RemoteFailure: the import of the class or its constructor failed; carries that exception.
        """
        context = self._context = _rehearsing(context)
        lost = device_claims.keep(context.claims)
        faulthandler.enable()
        stacks.register()
        enter_breakpoints()
        own = {"MASTER_ADDR": context.master_addr, "MASTER_PORT": str(master_port), **context.placement.environment()}
        os.environ.update({name: value for name, value in own.items() if name not in context.given})
        add_user_folders(context.session.import_path)
        add_working_folder(context.session.working_folder)
        enter_session(replace(context.session, member=context.address))
        set_up_logging(context)
        if lost:
            logging.getLogger("rlinf").warning(
                "the driver gave no copy of its claims on devices: they look free if it ends before this process"
            )
        if context.session.trace:
            activity.start()
        self._join(context, manager)
        self._worker = self._published("__init__", lambda _: _make(context, pickled))
        return os.getpid()

    def _join(self, context: WorkerContext, manager: EndpointInfo) -> None:
        """Make this process reachable for its peers, before it runs user code, which may communicate."""
        placement = context.placement
        client = ManagerClient(
            context.session, manager, context.address, ip=advertised_on(context.node_ip), fallback=pickle_by_value
        )
        client.on_cancel = self._give_up
        client.in_flight = unanswered.in_flight
        client.endpoint.waits.check = check_call
        self._client = client
        enter_job(client)
        device = ""
        if placement.local_accelerator_rank is not None and placement.accelerator_type is not None:
            kind = get_accelerator(placement.accelerator_type).torch_device
            device = f"{kind}:{placement.local_accelerator_rank}"
        node = f"node {placement.cluster_node_rank} ({context.node_ip})"
        client.announce(context.incarnation, node, placement.cluster_node_rank, device, context.host)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the worker's method that the task is named after; return its result, as a `Timed` if timers ran in it.

        Raises:
            RemoteFailure: the method failed; carries its exception.
        """
        # Passing the method as an argument would cost Ray more than everything done here.
        method: str = self._task.get_task_name()

        def run(call: MethodCall) -> Any:
            result = getattr(self._worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = self._await(method, result, call)
            if isinstance(result, (GeneratorType, AsyncGeneratorType)):
                # Ray would run the generator, and return only its first item.
                raise TypeError(
                    f"`{type(self._worker).__name__}.{method}` returned a generator, which cannot be sent: return a"
                    " list, or put the items into a channel"
                )
            return result

        with recording() as durations:
            try:
                result = self._published(method, run)
            except RemoteFailure:
                if self._cancelled.pop(self._task.get_task_id(), None) is None:
                    raise
                # The caller has the error already; Ray would print an error that nobody retrieves.
                return None
        return Timed(result, durations) if durations else whole(result)

    @property
    def _connected(self) -> ManagerClient:
        if self._client is None:
            raise RuntimeError("called before construct()")
        return self._client

    def _published(self, method: str, run: Callable[[MethodCall], T]) -> T:
        """Run `run` and return its result; publish the running method, and pack its exception."""
        client = self._connected
        call = MethodCall(self._task.get_task_id(), threading.get_ident())
        if not self._calls:
            # Mismatches of earlier calls' messages do not count for this call, even if reported during it.
            client.endpoint.disregard_mismatches()
        self._calls[call.serial] = call
        token = current_call.set(call)
        call.operation = client.operations.begin(OperationKind.METHOD, method)
        failure: str | None = "SystemExit"
        try:
            refused = self._dismissed or self._cancelled.get(call.serial)
            if refused is not None:
                raise refused
            with self._memory.during(method):
                result = run(call)
            failure = None
            for mismatch in client.endpoint.take_mismatches():
                # A peer rejected a message of this call, after the sending operation had returned.
                raise mismatch
            return result
        except BaseException as error:  # noqa: BLE001 - user code can raise anything
            # Errors of a call that the shutdown interrupted are a consequence of the shutdown.
            failed = self._failure((self._dismissed if isinstance(error, Exception) else None) or error)
            failure = failed.error.summary
            raise failed from None
        finally:
            if method != "__init__":
                client.operations.returned(method, failure)
            client.operations.end(call.operation)
            current_call.reset(token)
            del self._calls[call.serial]

    def _await(self, method: str, result: Awaitable[Any], call: MethodCall) -> Any:
        """Return the result of an asynchronous method, run as a task whose waits are published."""
        client = self._connected

        async def run() -> Any:
            call.task_key = asyncio.current_task()
            with client.operations.during(OperationKind.METHOD, method, task_key=call.task_key):
                return await result

        client.operations.end(call.operation)
        return run_on_loop(run())

    def _give_up(self, calls: tuple[str, ...] | None) -> None:
        """Interrupt the waits of these calls, or of all: their results are no longer wanted."""
        client, context = self._client, self._context
        if client is None or context is None:
            return
        error = CancelledOperationError("the call was cancelled", where=str(context.address))
        if calls is None:
            error = self._dismiss(context)
        for serial in tuple(self._calls) if calls is None else calls:
            if calls is not None:
                self._cancelled[serial] = error
                if len(self._cancelled) > _CANCELLED_KEPT:
                    self._cancelled.pop(next(iter(self._cancelled)), None)
            call = self._calls.get(serial)
            if call is not None:
                call.given_up = error
                # If it is the only call, all waits of the process belong to it, including those of its tasks.
                client.endpoint.waits.fail_task(call.task_key if len(self._calls) > 1 else None, error)

    def _dismiss(self, context: WorkerContext) -> CancelledOperationError:
        why = "its group is shut down"
        self._dismissed = CancelledOperationError("the call was cancelled", where=str(context.address), why=why)
        return self._dismissed

    def worker_info(self) -> Any:
        return self._worker.worker_info

    def take_spans(self) -> activity.Taken:
        return activity.take()

    def start_profile(self, kind: str, path: str) -> None:
        """Begin to profile this process into `PATH-RANK.json`."""
        rank = self._context.placement.rank if self._context is not None else 0
        self._profile = start_profile(kind, f"{path}-{rank}.json")

    def stop_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def memory_peaks(self) -> dict[str, Peak]:
        return self._memory.peaks

    def call_records(self) -> list[CallRecord]:
        return call_records()

    def fail_exchange(self, peers: tuple[str, ...]) -> None:
        """Fail the pending operations with these workers, which failed or cancelled calls left behind."""
        for name in peers:
            error = CancelledOperationError("the exchange is started over")
            self._connected.endpoint.fail(error, WorkerAddress.from_name(name))

    def drop_messages(self, peers: tuple[str, ...], mark: str) -> None:
        """Receive and drop the messages of these workers up to `mark`, which each of them sends in this call, too.

        All of them must have called `fail_exchange` before: a receive left behind would take the mark.

        Raises:
            RemoteFailure: a peer has died, or does not send.
        """
        self._published("drop_messages", lambda _: self._drop_messages(peers, mark))

    def _drop_messages(self, peers: tuple[str, ...], mark: str) -> None:
        client = self._connected
        addresses = [WorkerAddress.from_name(name) for name in peers]
        groups = [(address, CollectiveGroup(client.endpoint, client.me, (address,), client)) for address in addresses]
        sent = [group.send(mark, address, async_op=True) for address, group in groups]
        for address, group in groups:
            while True:
                # A dropped message may be a tensor, or may not unpickle.
                with contextlib.suppress(MismatchError, PayloadError):
                    if group.recv(address) == mark:
                        break
        for work in sent:
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Release the worker's resources before the process ends."""
        worker, self._worker = self._worker, None
        if self._context is not None:
            self._dismiss(self._context)
        self.stop_profile()
        if worker is not None:
            worker._close()
        if self._client is not None:
            self._client.close()

    def _failure(self, error: BaseException) -> RemoteFailure:
        if isinstance(error, SystemExit):
            # `sys.exit()` in a worker ends its process.
            if self._client is not None:
                self._client.tell_exit_reason(f"it called `sys.exit({error.code!r})`")
            raise error
        where = str(self._context.address) if self._context else None
        return RemoteFailure(PackedError.of(error, where))


def _rehearsing(context: WorkerContext) -> WorkerContext:
    """Return the context; in a rehearsal, pace the calls of this process and return the context without accelerators
    and robots, which other jobs may use.
    """
    if context.session.pacing is None:
        return context
    place = context.placement
    held = place.local_accelerator_rank is not None
    device = f"{context.session.job}-{place.cluster_node_rank}-{place.local_accelerator_rank}" if held else ""
    pacing.start(context.session.pacing, device)
    if place.accelerator_type is not None:
        os.environ[place.visibility_variable] = ""
    return replace(context, placement=place.without_devices(), hardware=())


def _make(context: WorkerContext, pickled: bytes) -> Any:
    worker_class, args, kwargs = pickle.loads(pickled)  # noqa: S301 - from the driver, through Ray
    worker = worker_class.__new__(worker_class)
    worker._rlinf_bind(replace(context, hardware=tuple(unit.on_node(os.environ) for unit in context.hardware)))
    made = worker.__init__(*args, **kwargs)
    if made is not None:
        # As if the class were called: an `async def` would never run.
        raise TypeError(f"`{worker_class.__name__}.__init__` must return None, not {type(made).__name__!r}")
    return worker


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="rlinf-async-methods", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # The error ended a task, whose waiters get it. The loop must continue for all other tasks.
            continue
        return


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, run on the worker's loop with the context variables of the caller.

    Raises:
        BaseException: the error of the coroutine, including `SystemExit` and `KeyboardInterrupt`.
    """

    loop = _loop()
    context = contextvars.copy_context()
    future: asyncio.Future[T] | None = None
    done = threading.Event()

    def start() -> None:
        nonlocal future
        future = loop.create_task(coroutine, context=context)
        future.add_done_callback(lambda _: done.set())

    loop.call_soon_threadsafe(start)
    done.wait()
    if future is None:
        raise RuntimeError("the loop of asynchronous methods stopped")
    return future.result()
