"""The stacks of this process's threads, as text."""

from __future__ import annotations

import sys
import threading
import traceback

from rlinf_core.node.stacks.stack_text import ThreadStack, spell

# Threads of the runtime, irrelevant for user code.
_OURS = ("rlinf-", "ray_", "GCCollect", "PythonGCThread")


def describe_stacks() -> str:
    """Return the stack of each thread, the main one first, innermost call last."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    stacks: list[ThreadStack] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or (thread.name.startswith(_OURS) and thread.name != "rlinf-async-methods"):
            continue
        stacks.append(ThreadStack(thread.name, traceback.extract_stack(frame)))
    return spell(stacks)
