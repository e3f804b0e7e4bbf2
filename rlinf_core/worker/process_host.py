"""The actor that hosts the forked processes of a group on one node, these processes, and their handles for callers.

Ray carries calls only to this actor, which passes them on without unpickling. Its processes are forked, so that another
one costs some hundredths of a second and the memory that it writes to. A process joins Ray when its code first needs
Ray: to launch a group or a channel, or to call another group.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import secrets
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Final, NamedTuple

from rlinf_core.cluster import engine
from rlinf_core.cluster.ray_api import join_at_first_use, pickle_by_value, ray_api, session_folder
from rlinf_core.failures import PackedError
from rlinf_core.node.fork_server import ForkClient, ForkSettings
from rlinf_core.process.import_path import add_user_folders, add_working_folder
from rlinf_core.supervision.deaths import GONE, ProcessGone
from rlinf_core.worker.calls import RemoteFailure, unpicklable
from rlinf_core.worker.process import CurrentTask, WorkerProcess

LENGTH: Final = struct.Struct("!Q")


class HostedCall(NamedTuple):
    """A call that the host passes on.

    Attributes:
        serial: its id in Ray.
        method: the method of `WorkerProcess`.
        task: the worker's method, for `WorkerProcess.call`.
        arguments: the positional and named arguments, pickled.
        values: the positional arguments that Ray has resolved, by position.
    """

    serial: str
    method: str
    task: str
    arguments: bytes
    values: dict[int, Any]


class HostedAnswer(NamedTuple):
    """The answer to a call: its pickled result, or the pickled `RemoteFailure`."""

    serial: str
    failed: bool
    content: bytes


class _ForkedProcess:
    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection, self._name = connection, name
        self._task = CurrentTask()
        self._process = WorkerProcess(name, self._task)
        self._asked: queue.SimpleQueue[HostedCall] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def serve(self, concurrency: int | None) -> None:
        """Serve calls on this thread, or up to `concurrency` at once on other threads, until the host exits."""
        threading.Thread(target=self._receive, name="rlinf-calls", daemon=True).start()
        if concurrency is None:
            while True:
                self._answer(self._asked.get())
        with ThreadPoolExecutor(concurrency, "rlinf-call") as pool:
            while True:
                pool.submit(self._answer_or_end, self._asked.get())

    def _receive(self) -> None:
        try:
            stream = self._connection.makefile("rb")
            while True:
                (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
                # From the host, through a socket that only these two processes have.
                self._asked.put(pickle.loads(_exactly(stream, length)))  # noqa: S301
        except (OSError, EOFError):
            pass  # the host has ended
        except Exception:  # noqa: BLE001 - without this thread every caller would wait forever
            traceback.print_exc()
        os._exit(1)

    def _answer_or_end(self, ask: HostedCall) -> None:
        try:
            self._answer(ask)
        except SystemExit as end:
            # In this thread, SystemExit would end only the thread.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))

    def _answer(self, ask: HostedCall) -> None:
        self._task.name, self._task.serial = ask.task, ask.serial
        failed = True
        try:
            content = self._pickled(ask, self._result(ask))
            failed = False
        except RemoteFailure as error:
            content = pickle.dumps(error)
        except Exception as error:  # noqa: BLE001 - raised in the caller
            content = pickle.dumps(RemoteFailure(PackedError.of(error, self._name)))
        frame = pickle.dumps(HostedAnswer(ask.serial, failed, content))
        with self._sending:
            self._connection.sendall(LENGTH.pack(len(frame)) + frame)

    def _result(self, ask: HostedCall) -> Any:
        positional, named = pickle.loads(ask.arguments)  # noqa: S301 - from a process of the job, through Ray
        for position, value in ask.values.items():
            positional[position] = value
        return getattr(self._process, ask.method)(*positional, **named)

    def _pickled(self, ask: HostedCall, result: Any) -> bytes:
        try:
            try:
                return pickle.dumps(result, protocol=5)
            except (pickle.PicklingError, TypeError, AttributeError):
                return pickle_by_value(result)
        except Exception as error:  # noqa: BLE001 - a result's own `__reduce__` can raise anything
            raise unpicklable(f"the result of `{ask.task}`", error, where=self._name) from None


def main(connection: int, name: str, address: str, namespace: str, concurrency: int | None) -> None:
    """Serve the calls of the worker `name`.

    Args:
        connection: the descriptor of the socket to the host.
        address: the address of the host's Ray.
        namespace: the job's namespace in it.
        concurrency: the number of concurrent calls; None for one after another, on the main thread.
    """
    join_at_first_use(lambda ray: engine.join_late(ray, address, namespace))
    _ForkedProcess(socket.socket(fileno=connection), name).serve(concurrency)


def _exactly(stream: Any, size: int) -> bytes:
    content: bytes = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


# The grace period for replies of a process that exited.
_LAST_ANSWERS_SECONDS: Final = 1.0
# The most concurrent calls of Ray's asynchronous actor; further calls wait.
CONCURRENCY: Final = 1 << 16


class Pickled:
    """A pickled result that unpickles as the value itself, so that the host passes it on without unpickling."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


class _Line:
    """The calls of one caller on one process, put in order: Ray does not keep the order."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Callable[[], None]] = {}

    def take(self, number: int, send: Callable[[], None]) -> None:
        """Send call `number` once all earlier calls were sent, then the later calls that have already arrived."""
        self._waiting[number] = send
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            ready()


class _Process:
    """A process in the records of its host.

    Args:
        reader, writer: the connection to it.
        ended: the future wait status, as of `os.waitpid`, or the reason why there is none.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Future[int | str]
    ) -> None:
        self._writer = writer
        # By Ray's id of the call.
        self._answers: dict[str, asyncio.Future[HostedAnswer]] = {}
        self._lines: dict[str, _Line] = {}
        self._reading = asyncio.create_task(self._read(reader))
        self.ended = ended
        self._ending: asyncio.Task[None] | None = None
        ended.add_done_callback(self._begin_to_end)

    def call(self, caller: str, number: int, ask: HostedCall) -> asyncio.Future[HostedAnswer]:
        """Send the caller's call of that number in its turn; return the future answer."""
        answer: asyncio.Future[HostedAnswer] = asyncio.get_running_loop().create_future()

        def send() -> None:
            if self.ended.done():
                answer.set_exception(_gone(self.ended.result()))
                return
            try:
                frame = pickle.dumps(ask)
            except Exception as error:  # noqa: BLE001 - a value of this call is at fault; other calls must continue
                answer.set_exception(error)
                return
            self._answers[ask.serial] = answer
            self._writer.write(LENGTH.pack(len(frame)) + frame)

        self._lines.setdefault(caller, _Line()).take(number, send)
        return answer

    def _begin_to_end(self, ended: asyncio.Future[int | str]) -> None:
        self._ending = asyncio.create_task(self._fail(ended.result()))

    async def _fail(self, status: int | str) -> None:
        # With a time limit: children of the process may hold the connection open.
        await asyncio.wait([self._reading], timeout=_LAST_ANSWERS_SECONDS)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(_gone(status))
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                # From a process that this one has forked; values of the worker in it stay pickled.
                answer: HostedAnswer = pickle.loads(await reader.readexactly(length))  # noqa: S301
                future = self._answers.pop(answer.serial, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the fork server reports the end of the process


class ProcessHost:
    """The host of a group's processes on one node.

    Args:
        modules: the modules to import once for all processes.
        concurrency: the number of concurrent calls in each process; None for one after another, on the main thread.
        folders, working_folder: the folders and working folder to import from, as in `Session`.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[str, ...],
        concurrency: int | None,
        folders: tuple[str, ...],
        working_folder: str | None,
    ) -> None:
        self._name = name
        add_user_folders(folders)
        add_working_folder(working_folder)
        context = ray_api().get_runtime_context()
        settings = ForkSettings(
            entry=f"{main.__module__}:{main.__name__}",
            # A class of the driver's script is pickled by value, which needs `ray.cloudpickle` to unpickle.
            modules=(main.__module__, *("ray.cloudpickle" if name == "__main__" else name for name in modules)),
            path=tuple(sys.path),
            logs=os.path.join(session_folder(), "logs"),
            job=str(context.get_job_id()),
            arguments=(str(context.gcs_address), str(context.namespace), concurrency),
        )
        self._server = ForkClient(settings)
        self._context = context
        self._processes: dict[str, asyncio.Task[_Process]] = {}
        self._ends: dict[str, asyncio.Future[int | str]] = {}
        self._listens = False

    def __repr__(self) -> str:
        """Return the prefix that Ray gives to lines of this process; Ray asks once, at its start."""
        return self._name

    async def _process(self, name: str) -> _Process:
        """Return the process of a worker, which is forked on the first call."""
        if name not in self._processes:
            self._processes[name] = asyncio.create_task(self._start(name))
        return await asyncio.shield(self._processes[name])

    async def _start(self, name: str) -> _Process:
        loop = asyncio.get_running_loop()
        # Made first: the end of the process may be reported before the connection to it is open.
        ended = self._ends[name] = loop.create_future()
        if not self._listens:
            self._listens = True
            loop.add_reader(self._server.socket, self._listen)
        try:
            connection = self._server.start(name)
        except OSError as error:
            raise _gone(str(error)) from None
        return _Process(*await asyncio.open_connection(sock=connection), ended)

    def _listen(self) -> None:
        try:
            message = self._server.receive()
        except OSError:
            message = None
        if message is None:
            asyncio.get_running_loop().remove_reader(self._server.socket)
            for ended in self._ends.values():
                if not ended.done():
                    ended.set_result("the one that had forked it has ended")
        elif "end" in message:
            self._ends[message["name"]].set_result(message["end"])

    async def call(
        self,
        name: str,
        caller: str,
        number: int,
        method: str,
        arguments: bytes,
        positions: tuple[int, ...],
        *values: Any,
    ) -> Pickled:
        """Call a method of a process's `WorkerProcess`; return the result.

        Args:
            caller: a unique name of the caller.
            number: the number of the call among the caller's calls on the process, from 0.
            method: a method of `WorkerProcess`; `call` calls the worker's method with the name of this Ray task.
            arguments: the positional and named arguments, pickled.
            positions: the positions of the positional arguments that `values` replace.
            values: the values of references, which Ray has resolved.

        Raises:
            RemoteFailure: the method failed; carries its exception.
            ProcessGone: the process has ended.
        """
        serial, task = self._context.get_task_id(), self._context.get_task_name()
        resolved = dict(zip(positions, values, strict=True))
        process = await self._process(name)
        answer = await process.call(caller, number, HostedCall(serial, method, task, arguments, resolved))
        if answer.failed:
            raise pickle.loads(answer.content)  # noqa: S301 - as Ray would
        return Pickled(answer.content)

    async def end(self, name: str) -> None:
        """Kill a process, and return when it has ended."""
        if name in self._processes:
            process = await self._process(name)
            self._server.kill(name)
            await asyncio.shield(process.ended)


def _gone(status: int | str) -> ProcessGone:
    if isinstance(status, str):
        return ProcessGone(f"{GONE}: {status}")
    return ProcessGone(f"exit code {os.waitstatus_to_exitcode(status)}")


class HostHandle:
    """A handle of a host, with the names of its processes that this caller has not ended."""

    def __init__(self, actor: Any, names: Iterable[str]) -> None:
        self.actor = actor
        self.names = set(names)

    def end(self, name: str) -> None:
        """End a process; if it is the last one, end the host."""
        self.names.discard(name)
        if self.names:
            self.actor.end.remote(name)
        else:
            ray_api().kill(self.actor)


class HostedActor:
    """A forked process whose methods are called like those of an actor: `actor.METHOD.remote(...)`."""

    def __init__(self, host: HostHandle, name: str) -> None:
        self._host, self._name = host, name
        self._caller, self._numbers = secrets.token_hex(8), count()

    def __getattr__(self, method: str) -> HostedMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostedMethod(self, method)

    def kill(self) -> None:
        """End the process, even if it has ended already."""
        self._host.end(self._name)

    def ended(self) -> Any:
        """Kill the process; return a reference that resolves when it has ended."""
        return self._host.actor.end.remote(self._name)

    def _call(self, method: str, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ray = ray_api()
        values = {position: value for position, value in enumerate(args) if isinstance(value, ray.ObjectRef)}
        positional = [None if position in values else value for position, value in enumerate(args)]
        pickled = ray.cloudpickle.dumps((positional, kwargs))
        carried = self._host.actor.call.options(name=task)
        # Numbered last: the host would wait for a number that is never sent.
        number = next(self._numbers)
        return carried.remote(self._name, self._caller, number, method, pickled, tuple(values), *values.values())


class HostedMethod:
    """A method of a forked process."""

    def __init__(self, actor: HostedActor, method: str, task: str = "") -> None:
        self._actor, self._method, self._task = actor, method, task or method

    def options(self, *, name: str) -> HostedMethod:
        """Return the method with another task name."""
        return HostedMethod(self._actor, self._method, name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; return Ray's reference to its result."""
        return self._actor._call(self._method, self._task, args, kwargs)  # pyright: ignore[reportPrivateUsage] - one of its own
