"""The event loop on which `async def` methods of workers run: one thread of its own, so that the main thread stays free
of a running loop and `asyncio.run` works in synchronous methods."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable
from functools import cache
from typing import TypeVar

T = TypeVar("T")


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
            # A task ended with it, which is for whoever waits for the task. The loop goes on for all others.
            continue
        return


def run_on_loop(awaitable: Awaitable[T]) -> T:
    """Return the result of an awaitable, run on the worker's loop with the context variables of the caller.

    Raises:
        BaseException: whatever it raised, `SystemExit` and `KeyboardInterrupt` included.
    """

    async def await_it() -> T:
        return await awaitable

    loop = _loop()
    context = contextvars.copy_context()
    future: asyncio.Future[T] | None = None
    done = threading.Event()

    def start() -> None:
        nonlocal future
        future = loop.create_task(await_it(), context=context)
        future.add_done_callback(lambda _: done.set())

    loop.call_soon_threadsafe(start)
    done.wait()
    if future is None:
        raise RuntimeError("the loop of asynchronous methods stopped")
    return future.result()
