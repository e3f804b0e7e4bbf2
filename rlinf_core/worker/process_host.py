"""The actor that hosts the processes of a group on one node, and its callers' handles of them.

Ray carries calls to this actor alone, which passes them on unread. Its processes are forked, so that one more costs
some hundredths of a second and the memory that it writes to.
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
from rlinf_core.worker.process import WorkerProcess

# A forked process of a group: takes calls from its host, and answers them.
#
# It joins Ray when something in it first needs Ray: launching a group or a channel, and calling another group.


LENGTH: Final = struct.Struct("!Q")


class HostedCall(NamedTuple):
    """A call.

    Attributes:
        number: its number on this connection.
        serial: its id in Ray.
        method: the method of `WorkerProcess`.
        task: the worker's method, for `WorkerProcess.call`.
        arguments: pickled: the positional and the named ones.
        values: those positional ones that Ray has resolved, by position.
    """

    number: int
    serial: str
    method: str
    task: str
    arguments: bytes
    values: dict[int, Any]


class HostedAnswer(NamedTuple):
    """The answer to a call: its pickled result, or the pickled `RemoteFailure`."""

    number: int
    failed: bool
    content: bytes


class _CurrentTask(threading.local):
    """The call that the current thread answers; in the place of Ray's runtime context."""

    ask: HostedCall | None = None

    def get_task_name(self) -> str:
        return self.ask.task if self.ask is not None else ""

    def get_task_id(self) -> str:
        return self.ask.serial if self.ask is not None else ""


class _ForkedProcess:
    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection, self._name = connection, name
        self._task = _CurrentTask()
        self._process = WorkerProcess(name, self._task)
        self._asked: queue.SimpleQueue[HostedCall] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def serve(self, concurrency: int | None) -> None:
        """Serve calls on this thread, or several at once on others, until the host exits."""
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
        except Exception:  # noqa: BLE001 - without this thread every caller would wait for ever
            traceback.print_exc()
        os._exit(1)

    def _answer_or_end(self, ask: HostedCall) -> None:
        try:
            self._answer(ask)
        except SystemExit as end:
            # In a thread it would only end that.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)

    def _answer(self, ask: HostedCall) -> None:
        self._task.ask = ask
        failed = True
        try:
            content = self._pickled(ask, self._result(ask))
            failed = False
        except RemoteFailure as error:
            content = pickle.dumps(error)
        except Exception as error:  # noqa: BLE001 - raised in the caller
            content = pickle.dumps(RemoteFailure(PackedError.of(error, self._name)))
        frame = pickle.dumps(HostedAnswer(ask.number, failed, content))
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
        name: the worker's address.
        address: the address of the Ray that the host is in.
        namespace: the job's in it.
        concurrency: the number of calls that it answers at once; None: one after another, on the main thread.
    """
    join_at_first_use(lambda ray: engine.join_late(ray, address, namespace))
    _ForkedProcess(socket.socket(fileno=connection), name).serve(concurrency)


def _exactly(stream: Any, size: int) -> bytes:
    content: bytes = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


# Grace period for replies of a process that exited.
_LAST_ANSWERS_SECONDS: Final = 1.0
# Of the engine's asynchronous actors: calls that are under way at once. More wait.
CONCURRENCY: Final = 1 << 16


class CallTurn(NamedTuple):
    """The place of a call among those that one caller makes on one process: Ray does not keep the order.

    Attributes:
        caller: a name that no other caller has.
        number: its number, from 0.
    """

    caller: str
    number: int


class Pickled:
    """A result that unpickles as the value itself: the host passes it on unread."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


class _Line:
    """Calls of one caller that wait for their turn."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Callable[[], None]] = {}

    def take(self, number: int, send: Callable[[], None]) -> None:
        """Send this call, and those after it that have come already, once all before it were sent."""
        self._waiting[number] = send
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            ready()


class _Process:
    """A process as its host knows it.

    Args:
        reader, writer: the connection to it.
        ended: gets its wait status as of `os.waitpid`, or the reason why it has none.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Future[int | str]
    ) -> None:
        self._writer = writer
        self._answers: dict[int, asyncio.Future[HostedAnswer]] = {}
        self._lines: dict[str, _Line] = {}
        self._count = 0
        self._reading = asyncio.create_task(self._read(reader))
        self.ended = ended
        self._ending: asyncio.Task[None] | None = None
        ended.add_done_callback(self._begin_to_end)

    def call(self, order: CallTurn, ask: Callable[[int], HostedCall]) -> asyncio.Future[HostedAnswer]:
        """Send a call in its turn; return its future answer."""
        answer: asyncio.Future[HostedAnswer] = asyncio.get_running_loop().create_future()

        def send() -> None:
            number = self._count
            self._count += 1
            if self.ended.done():
                answer.set_exception(_gone(self.ended.result()))
                return
            try:
                frame = pickle.dumps(ask(number))
            except Exception as error:  # noqa: BLE001 - a value of this call; it may be another one's turn
                answer.set_exception(error)
                return
            self._answers[number] = answer
            self._writer.write(LENGTH.pack(len(frame)) + frame)

        self._lines.setdefault(order.caller, _Line()).take(order.number, send)
        return answer

    def _begin_to_end(self, ended: asyncio.Future[int | str]) -> None:
        self._ending = asyncio.create_task(self._fail(ended.result()))

    async def _fail(self, status: int | str) -> None:
        # Its own children may hold the connection open.
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
                # From a process that this one has made; what it holds of the worker stays pickled.
                answer: HostedAnswer = pickle.loads(await reader.readexactly(length))  # noqa: S301
                future = self._answers.pop(answer.number, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the server reports its end


class ProcessHost:
    """The host of a group's processes on one node.

    Args:
        name: the name, for lines that it prints.
        modules: imported once for all processes.
        concurrency: the number of calls that each of them answers at once; None: one after another, on the main thread.
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
            # A class of the driver's script comes by value, which needs the library that pickled it.
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
        """Return Ray's prefix for lines of this process; Ray asks once, at its start."""
        return self._name

    async def _process(self, name: str) -> _Process:
        """Return the process of a worker, which is forked at the first call."""
        if name not in self._processes:
            self._processes[name] = asyncio.create_task(self._start(name))
        return await asyncio.shield(self._processes[name])

    async def _start(self, name: str) -> _Process:
        loop = asyncio.get_running_loop()
        # Its end may be reported before the connection to it stands.
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
        self, name: str, order: CallTurn, method: str, arguments: bytes, positions: tuple[int, ...], *values: Any
    ) -> Pickled:
        """Have a process call a method of its `WorkerProcess`; return its result.

        Args:
            name: the process's worker.
            order: the call's turn.
            method: a method of `WorkerProcess`; `call` calls that of the worker which this task is named after.
            arguments: the positional and the named ones, pickled.
            positions: the positions of the arguments that `values` takes the place of.
            values: the values of references, which Ray has resolved.

        Raises:
            RemoteFailure: with the exception of the method.
            ProcessGone: the process has ended.
        """
        serial, task = self._context.get_task_id(), self._context.get_task_name()
        resolved = dict(zip(positions, values, strict=True))
        process = await self._process(name)
        answer = await process.call(order, lambda number: HostedCall(number, serial, method, task, arguments, resolved))
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
    """A host, and the names of those of its processes that this caller has not ended."""

    def __init__(self, actor: Any, names: Iterable[str]) -> None:
        self.actor = actor
        self.names = set(names)

    def end(self, name: str) -> None:
        """End a process; with the last one, the host."""
        self.names.discard(name)
        if self.names:
            self.actor.end.remote(name)
        else:
            ray_api().kill(self.actor)


class HostedActor:
    """The methods of one forked process, called as those of an actor: `actor.METHOD.remote(...)`."""

    def __init__(self, host: HostHandle, name: str) -> None:
        self._host, self._name = host, name
        self._caller, self._numbers = secrets.token_hex(8), count()

    def __getattr__(self, method: str) -> HostedMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostedMethod(self, method)

    def kill(self) -> None:
        """End the process, or one that has ended already."""
        self._host.end(self._name)

    def ended(self) -> Any:
        """Kill the process; return a reference to its having ended."""
        return self._host.actor.end.remote(self._name)

    def _call(self, method: str, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ray = ray_api()
        values = {position: value for position, value in enumerate(args) if isinstance(value, ray.ObjectRef)}
        positional = [None if position in values else value for position, value in enumerate(args)]
        pickled = ray.cloudpickle.dumps((positional, kwargs))
        # Numbered last: one that is never sent would be waited for.
        order = CallTurn(self._caller, next(self._numbers))
        carried = self._host.actor.call.options(name=task)
        return carried.remote(self._name, order, method, pickled, tuple(values), *values.values())


class HostedMethod:
    """A method of a forked process."""

    def __init__(self, actor: HostedActor, method: str, task: str = "") -> None:
        self._actor, self._method, self._task = actor, method, task or method

    def options(self, *, name: str) -> HostedMethod:
        """Return the method under another name of its task."""
        return HostedMethod(self._actor, self._method, name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; return Ray's reference to its result."""
        return self._actor._call(self._method, self._task, args, kwargs)  # pyright: ignore[reportPrivateUsage] - one of its own
