"""A forked process of a group: takes calls from its host, and answers them.

It joins Ray when its code first needs Ray: to launch a group or a channel, or to call another group.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import struct
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from rlinf_core.cluster import engine
from rlinf_core.cluster.ray_api import join_at_first_use, pickle_by_value
from rlinf_core.failures import PackedError
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
