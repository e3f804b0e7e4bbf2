"""The actor that hosts the processes of a group on one node, and its callers' handles of them.

Ray carries calls to this actor alone, which passes them on unread. Its processes are forked, so that one more costs
some hundredths of a second and the memory that it writes to.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Final

from rlinf_core.cluster.ray_api import ray_api, session_folder
from rlinf_core.node.fork_server import ForkClient, ForkSettings
from rlinf_core.process.import_path import add_user_folders, add_working_folder
from rlinf_core.supervision.deaths import GONE, ProcessGone
from rlinf_core.worker.forked_process import LENGTH, HostedAnswer, HostedCall, main

# Grace period for replies of a process that exited.
_LAST_ANSWERS_SECONDS: Final = 1.0
# Of the engine's asynchronous actors: calls that are under way at once. More wait.
CONCURRENCY: Final = 1 << 16


class Pickled:
    """A result that unpickles as the value itself: the host passes it on unread."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


class _Line:
    """Calls of one caller on one process that wait for their turn: Ray does not keep the order."""

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
        # By Ray's id of the call.
        self._answers: dict[str, asyncio.Future[HostedAnswer]] = {}
        self._lines: dict[str, _Line] = {}
        self._reading = asyncio.create_task(self._read(reader))
        self.ended = ended
        self._ending: asyncio.Task[None] | None = None
        ended.add_done_callback(self._begin_to_end)

    def call(self, caller: str, number: int, ask: HostedCall) -> asyncio.Future[HostedAnswer]:
        """Send a call in its turn, which is the caller's of that number; return its future answer."""
        answer: asyncio.Future[HostedAnswer] = asyncio.get_running_loop().create_future()

        def send() -> None:
            if self.ended.done():
                answer.set_exception(_gone(self.ended.result()))
                return
            try:
                frame = pickle.dumps(ask)
            except Exception as error:  # noqa: BLE001 - a value of this call; it may be another one's turn
                answer.set_exception(error)
                return
            self._answers[ask.serial] = answer
            self._writer.write(LENGTH.pack(len(frame)) + frame)

        self._lines.setdefault(caller, _Line()).take(number, send)
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
                future = self._answers.pop(answer.serial, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the server reports its end


class ProcessHost:
    """The host of a group's processes on one node.

    Args:
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
        self,
        name: str,
        caller: str,
        number: int,
        method: str,
        arguments: bytes,
        positions: tuple[int, ...],
        *values: Any,
    ) -> Pickled:
        """Have a process call a method of its `WorkerProcess`; return its result.

        Args:
            caller: a name that no other caller has.
            number: the place of the call among those that it makes on the process, from 0.
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
        carried = self._host.actor.call.options(name=task)
        # Numbered last: one that is never sent would be waited for.
        number = next(self._numbers)
        return carried.remote(self._name, self._caller, number, method, pickled, tuple(values), *values.values())


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
