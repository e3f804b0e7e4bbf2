"""The network around an arm's controller, and the common part of all controllers' commands.

Anybody may send `stop`, so a new connection is always accepted. If there are too many, one that does not hold the arm
is closed: of the address with the most, the one that has been silent longest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable

from recipes.embodied.robots.controller.controller import POLL_SECONDS, Controller, Motion
from recipes.embodied.robots.wire_protocol import (
    MAX_LINE,
    Box,
    Message,
    ProtocolError,
    box_of,
    decode,
    encode,
    request_of,
)
from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of
from rlinf_core.hardware.franka import ROBOT_PORT

MAX_CONNECTIONS = 32  # besides the holder's
MAX_OF_ONE_ADDRESS = 16
FIRST_SECONDS = 5.0  # time limit for the first request of a connection
IDLE_SECONDS = 60.0  # a silent connection that does not hold the arm is closed after this
WRITE_SECONDS = 5.0  # time limit for a client to take its replies
_log = logging.getLogger("rlinf.robots")


class Server:
    """The network around a controller. Use `start`, then `close`.

    Attributes:
        watching: the task that watches the arm after `start`.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._numbers = itertools.count(1)
        self._talking: set[asyncio.Task[None]] = set()
        # Connections that do not hold the arm. The holder's is never closed for a newcomer.
        self._others: Unproven[asyncio.Task[None]] = Unproven(MAX_CONNECTIONS, from_one=MAX_OF_ONE_ADDRESS)
        self._warn = LimitedWarnings(_log.warning)
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the actual port if 0 was requested.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_LINE)
        self.watching = asyncio.create_task(self._watch())
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def close(self) -> None:
        """Stop the arm and end every connection."""
        if self._server is not None:
            self._server.close()
        ending = [*self._talking, self.watching]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._warn.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        origin = origin_of(writer.get_extra_info("peername"))
        leaving = self._others.admit(task, origin)
        for other in leaving:
            other.cancel()
        if leaving:
            self._warn(f"a silent connection was closed to make room for one from {origin}")
        self._talking.add(task)
        number, why = next(self._numbers), "its connection was closed"
        try:
            why = await self._talk(number, reader, writer, task, origin)
        except OSError as error:
            why = f"its connection broke: {error.strerror or error}"
        except asyncio.CancelledError:
            why = "the controller was switched off"
        finally:
            if self._controller.lost(number, why, time.monotonic()):
                _log.warning("safe stop: the holder's link was lost, %s", why)
            self._wake()
            self._talking.discard(task)
            self._others.remove(task)
            writer.close()

    async def _talk(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None],
        origin: str,
    ) -> str:
        """Serve one client until it leaves; return the reason.

        Args:
            number: the number of its connection.
            task: the task of its connection.
            origin: the address under which it is counted.
        """
        motions: set[asyncio.Task[None]] = set()
        idle = FIRST_SECONDS
        try:
            while True:
                allowed = self._controller.silence_allowed(number)
                try:
                    line = await asyncio.wait_for(reader.readline(), allowed or idle)
                except TimeoutError:
                    return f"it sent nothing for {allowed or idle:g} s"
                except ValueError:
                    line = b" " * (MAX_LINE + 1)  # longer than the reader's limit, which `decode` reports
                if not line.endswith(b"\n") and len(line) <= MAX_LINE:
                    return "its connection was closed"
                try:
                    request = request_of(decode(line))
                    answer = self._controller.handle(number, request, time.monotonic())
                except ProtocolError as error:
                    self._warn(f"connection {number} from {origin} sent {error}; closed")
                    await self._send(writer, {"id": 0, "ok": False, "code": "bad-request", "message": str(error)})
                    return f"it sent {error}"
                idle = IDLE_SECONDS
                self._place(number, task, origin)
                if request.op == "stop":
                    self._wake()
                if isinstance(answer, Motion):
                    task = asyncio.create_task(self._follow(answer, writer))
                    motions.add(task)
                    task.add_done_callback(motions.discard)
                elif answer is not None:
                    await self._send(writer, answer)
        finally:
            for task in motions:
                task.cancel()

    def _place(self, number: int, task: asyncio.Task[None], origin: str) -> None:
        """Register a connection that has sent a request as one that may be closed, unless it holds the arm."""
        self._others.remove(task)
        if self._controller.silence_allowed(number) is None:
            # Behind connections that have been silent longer.
            for other in self._others.admit(task, origin):
                other.cancel()

    async def _follow(self, motion: Motion, writer: asyncio.StreamWriter) -> None:
        while not self._controller.interrupted(motion) and not self._controller.ended(motion, now := time.monotonic()):
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(self._controller.due(motion, now) - now, 0))
            self._controller.expire(time.monotonic())
        await self._send(writer, self._controller.finish(motion, time.monotonic()))

    async def _watch(self) -> None:
        """Watch the arm between requests: it may still follow a target, or end its motion by itself."""
        self._controller.looked = time.monotonic()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._controller.watch(time.monotonic())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        try:
            writer.write(encode(message))
            await asyncio.wait_for(writer.drain(), WRITE_SECONDS)
        except (OSError, TimeoutError):
            # The reader of this connection notices the end.
            writer.transport.abort()


async def serve(host: str, port: int, controller: Controller) -> int:
    """Serve until interrupted; returns the exit status.

    Raises:
        Exception: the watch over the arm failed, without which nothing may move it.
    """
    server = Server(controller)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        address = await server.start(host, port)
    except OSError as error:
        print(
            f"error: cannot listen on {host}:{port}: {error.strerror or error}\n"
            "  help: choose an address of this machine and a port that is free, or end what listens there",
            file=sys.stderr,
        )
        return 1
    print(f"listening on {address[0]}:{address[1]}", flush=True)
    interrupted = asyncio.create_task(ended.wait())
    await asyncio.wait((interrupted, server.watching), return_when=asyncio.FIRST_COMPLETED)
    if not interrupted.done():
        server.watching.result()
    await server.close()
    return 0


def controller_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of `host`, `port` and `workspace`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, default=ROBOT_PORT, help=f"TCP port (default: {ROBOT_PORT}; 0: a free one)"
    )
    parser.add_argument(
        "--workspace", type=_box, metavar="X,Y,Z,X,Y,Z", help="two opposite corners of the hand's workspace"
    )
    return parser


def positive(most: float) -> Callable[[str], float]:
    """Return a parser of a number above 0, up to `most`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0, up to {most:g}")
        return number

    return parse


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"`{text}` is not a port from 0 to 65535")
    return port


def _box(text: str) -> Box:
    try:
        numbers = [float(number) for number in text.split(",")]
        return box_of((numbers[:3], numbers[3:]))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not six numbers, the lower corner first") from None
