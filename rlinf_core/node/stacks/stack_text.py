"""The text of stacks, the same whoever has read them."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from traceback import FrameSummary, format_list
from typing import Any, Final, NamedTuple, cast

# Frames of the engine, irrelevant for user code.
_ENGINE: Final = "/site-packages/ray/"
# Whose frames alone make no thread of interest: it waits for work.
_RUNTIME: Final = (
    _ENGINE,
    "/rlinf_core/",
    "/threading.py",
    "/selectors.py",
    "/asyncio/",
    "/concurrent/futures/",
    "/socket.py",
)
_NATIVE_LINE: Final = 0


class ThreadStack(NamedTuple):
    """The stack of one thread, innermost call last."""

    name: str
    frames: Sequence[FrameSummary]

    @property
    def text(self) -> str:
        """The calls with their lines, as in a traceback; empty where only the engine's are there."""
        return "".join(_line(frame) for frame in self.frames if _ENGINE not in frame.filename).rstrip()

    @property
    def is_runtime(self) -> bool:
        """Whether no frame is that of user code."""
        return all(any(part in frame.filename for part in _RUNTIME) for frame in self.frames)


def spell(threads: Iterable[ThreadStack]) -> str:
    """Return the stacks of threads as text, one paragraph each."""
    return "\n".join(f"thread {thread.name}:\n{thread.text}" for thread in threads if thread.text)


def of_interest(threads: Sequence[ThreadStack]) -> list[ThreadStack]:
    """Return the threads that run user code; all of them if none does."""
    return [thread for thread in threads if not thread.is_runtime] or list(threads)


def threads_of_spy(report: Any) -> list[ThreadStack]:
    """Return the threads of a report of `py-spy dump --json`, the main one first.

    Raises:
        ValueError: it is not such a record.
    """
    try:
        threads = [_spied(thread) for thread in cast("list[Mapping[str, Any]]", report)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"py-spy's report cannot be read: {type(error).__name__}: {error}") from None
    return sorted(threads, key=lambda thread: thread.name.split(",")[0] != "MainThread")


def _spied(thread: Mapping[str, Any]) -> ThreadStack:
    name = str(thread["thread_name"] or thread["os_thread_id"] or thread["thread_id"])
    frames = [
        FrameSummary(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in thread["frames"]
    ]
    return ThreadStack(f"{name}, holds the interpreter's lock" if thread["owns_gil"] else name, frames[::-1])


def _line(frame: FrameSummary) -> str:
    if frame.lineno in (None, _NATIVE_LINE):
        return f'  File "{frame.filename}", in {frame.name}\n'
    return "".join(format_list([frame]))


# Threads of the runtime, irrelevant for user code.
_RUNTIME_THREADS = ("rlinf-", "ray_", "GCCollect", "PythonGCThread")


def describe_stacks() -> str:
    """Return the stack of each thread, the main one first, innermost call last."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    stacks: list[ThreadStack] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or (thread.name.startswith(_RUNTIME_THREADS) and thread.name != "rlinf-async-methods"):
            continue
        stacks.append(ThreadStack(thread.name, traceback.extract_stack(frame)))
    return spell(stacks)
