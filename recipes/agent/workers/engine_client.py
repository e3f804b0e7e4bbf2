"""An agent process's client of the engines, which batches the requests of concurrent turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest, agent_key, engine_key
from rlinf_core import Channel, CommunicationTimeoutError


async def next_item(channel: Channel, key: str) -> Any:
    """Return the next item of a channel, with no time limit, as tools and trainers may be slow."""
    while True:
        with suppress(CommunicationTimeoutError):
            return await channel.get(key=key, async_op=True).async_wait()


class EngineRoute:
    """The engine of one run, kept for the whole run so that shared prefixes are computed once."""

    def __init__(self, client: EngineClient, engine: int) -> None:
        self._client = client
        self.engine = engine

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        """Return a turn."""
        return await self._client.draw(self.engine, request)


class EngineClient:
    """Requests turns from engines through a channel.

    Args:
        channel: the channel to the engines and back.
        rank: the rank of this process.
        engines: the number of engines.
    """

    def __init__(self, channel: Channel, rank: int, engines: int) -> None:
        self._channel = channel
        self._rank = rank
        self._load = [0] * engines
        # Numbers that no dead predecessor of this process used, as answers to it may still arrive.
        self._numbers = itertools.count(time.monotonic_ns())
        self._waiting: dict[int, asyncio.Future[DrawnTurn]] = {}
        self._outgoing: defaultdict[int, list[DrawRequest]] = defaultdict(list)
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Read answers while the context is open."""
        self._reading = asyncio.create_task(self._read())
        try:
            yield
        finally:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading

    def route(self, runs: int) -> EngineRoute:
        """Return the engine with the fewest runs of this process, and count the new runs.

        Args:
            runs: the number of runs that will use it.
        """
        # Processes start with different engines.
        count = len(self._load)
        engine = min(range(count), key=lambda rank: (self._load[rank], (rank - self._rank) % count))
        self._load[engine] += runs
        return EngineRoute(self, engine)

    def leave(self, route: EngineRoute) -> None:
        """Count the end of a run."""
        self._load[route.engine] -= 1

    async def draw(self, engine: int, request: DrawRequest) -> DrawnTurn:
        """Return a turn of an engine."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        result = self._waiting[number] = loop.create_future()
        if not self._outgoing[engine]:
            # Sent after all runs have continued as far as possible, so that their requests share one message.
            loop.call_soon(self._send, engine)
        self._outgoing[engine].append(request._replace(request_id=number, agent=self._rank))
        try:
            return await result
        finally:
            self._waiting.pop(number, None)

    def _send(self, engine: int) -> None:
        requests = self._outgoing.pop(engine)
        self._channel.put(tuple(requests), key=engine_key(engine))

    async def _read(self) -> None:
        try:
            while True:
                for turn in await next_item(self._channel, agent_key(self._rank)):
                    self._settle(turn)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)

    def _settle(self, turn: DrawnTurn) -> None:
        result = self._waiting.get(turn.request_id)
        # A run that hit its time limit no longer waits.
        if result is not None and not result.done():
            result.set_result(turn)
