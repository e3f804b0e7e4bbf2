"""The stacks of this process's threads, as text."""

from __future__ import annotations

import sys
import threading
import traceback

# Threads of the runtime, irrelevant for user code.
_OURS = ("rlinf-", "ray_", "GCCollect")


def describe_stacks() -> str:
    """Return the stack of each thread, the main one first, innermost call last."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    parts: list[str] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or (thread.name.startswith(_OURS) and thread.name != "rlinf-async-methods"):
            continue
        lines = "".join(traceback.format_list(_of_interest(traceback.extract_stack(frame)))).rstrip()
        if lines:
            parts.append(f"thread {thread.name}:\n{lines}")
    return "\n".join(parts)


def _of_interest(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in stack if "/site-packages/ray/" not in frame.filename]
