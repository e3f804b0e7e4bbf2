from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from typing import Any

import pytest

from rlinf_core.worker.process import run_on_loop

# Seconds after which a call hangs, however busy the machine is.
HANGS = 60


async def give_up(error: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise error(3)


async def leave_to_a_task(error: type[BaseException]) -> None:
    await asyncio.create_task(give_up(error))


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, ValueError])
@pytest.mark.parametrize("method", [give_up, leave_to_a_task])
def test_coroutine_errors_are_raised_at_the_caller(
    error: type[BaseException], method: Callable[[type[BaseException]], Coroutine[Any, Any, None]]
) -> None:
    caller = ThreadPoolExecutor(1)
    called = caller.submit(run_on_loop, method(error))
    try:
        assert isinstance(called.exception(HANGS), error)
    except TooLate:
        pytest.fail("the call hangs")
    finally:
        caller.shutdown(wait=False)


def test_the_loop_goes_on_for_others_when_one_wants_to_exit() -> None:
    other = ThreadPoolExecutor(1)
    started = asyncio.Event()

    async def wait_for_the_other() -> int:
        await started.wait()
        return await answer()

    async def start_and_exit() -> None:
        started.set()
        raise SystemExit(3)

    waiting = other.submit(run_on_loop, wait_for_the_other())
    with pytest.raises(SystemExit):
        run_on_loop(start_and_exit())
    assert waiting.result(HANGS) == 42
    other.shutdown()
