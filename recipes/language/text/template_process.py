"""The process that renders chat templates, which are untrusted programs, within bounds of time, memory and size.

Each process that renders has one such child, which ends with it. If a template exceeds a bound, its process is killed,
and the next conversation gets a new process.
"""

# Values of templates have no types here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, Final

from recipes.language.sandbox.line_process import LineProcess
from rlinf_core.suggest import excerpt

# The maximum budget of processor seconds, and what each conversation and each MiB of it adds. Most conversations take
# less than a millisecond, so thousands pass, but not a template that always takes a second.
_SECONDS: Final = 2.0
_EACH: Final = 0.02
_EACH_MIB: Final = 1.0
# The further seconds until a process is killed that did not react to the signal.
_GRACE: Final = 0.2
# The wall-clock limit in seconds, generous for a busy machine.
_PATIENCE: Final = 60.0
_MEMORY: Final = 512 << 20
# The maximum characters of a rendered text, and the additional ones per byte of its conversation.
_LONGEST: Final = 1 << 20
_GROWTH: Final = 8
_MOST_REASON: Final = 300


class RenderingError(Exception):
    """A failure to render, with the reason, and the line of the template if known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason, line)
        self.reason, self.line = reason, line


class _BoundReachedError(Exception):
    """The end of a template's time, raised by a signal handler, which shows the template's line."""


def refuse_value(value: object) -> None:
    """Raise a RenderingError about a value that JSON does not have."""
    raise RenderingError(f"a value is a `{type(value).__name__}`, which JSON does not have: write it as a text")


class TemplateProcess:
    """The child process that renders; it starts with the first conversation.

    Args:
        seconds: the maximum budget of processor seconds.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> str:
        """Return the text of a conversation.

        Args:
            request: the `template`, the `messages`, the `tools` or None, whether the text `asks` for the model's turn,
                and further `arguments` of the template.

        Raises:
            RenderingError: the template refuses the conversation, has an error, or exceeds a bound.
        """
        try:
            data = json.dumps(request, default=refuse_value).encode()
        except RecursionError:
            raise RenderingError("its values are nested too deeply") from None
        with self._lock:
            reply = self._exchange(self._started(), data)
            if "late" in reply:
                self.close()
        if "text" in reply:
            return reply["text"]
        raise RenderingError(self._too_long if "late" in reply else reply["reason"], reply["line"])

    @property
    def _too_long(self) -> str:
        return f"it takes more than {self._seconds:g} s of processor time, with the conversations before this one"

    def _started(self) -> LineProcess:
        # After a fork, the stored process is the parent's.
        if self._process is None or self._owner != os.getpid() or self._process.process.poll() is not None:
            # The child needs no threads of OpenBLAS.
            self._process = LineProcess(__spec__.name, str(self._seconds), OPENBLAS_NUM_THREADS="1")
            self._owner = os.getpid()
            atexit.unregister(self.close)
            atexit.register(self.close)
        return self._process

    def _exchange(self, process: LineProcess, data: bytes) -> dict[str, Any]:
        """Return the reply to a line.

        Raises:
            RenderingError: the process has ended, or was killed for answering too late.
        """
        deadline = time.monotonic() + _PATIENCE
        try:
            process.send(data, deadline)
            return process.reply(deadline)
        except TimeoutError:
            why = f"it takes more than {_PATIENCE:g} s"
        except EOFError:
            code = process.process.wait()
            why = f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
            if code == -signal.SIGXCPU:
                why = self._too_long
        self.close()
        raise RenderingError(why)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.end()


PROCESS: Final = TemplateProcess()


# The child process


def _library() -> Any:
    """Return transformers' rendering module, without its packages' other imports, which take over a second."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec and spec.submodule_search_locations) or ():
        for name in ("transformers", "transformers.utils"):
            package = sys.modules[name] = types.ModuleType(name)
            package.__path__ = [os.path.join(folder, *name.split(".")[1:])]
    return importlib.import_module("transformers.utils.chat_template_utils")


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(left: float) -> None:
    """Have a signal raised after `left` more processor seconds, and the process killed soon after."""
    signal.setitimer(signal.ITIMER_PROF, max(0.01, left), 0.1)
    # A handler cannot interrupt a single long call of the interpreter, but a limit can.
    soft, most = math.ceil(time.process_time() + left + _GRACE), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if most == resource.RLIM_INFINITY else min(soft, most), most))


def _stop(_signal: int, _frame: object) -> None:
    raise _BoundReachedError


def _line_of(error: Exception) -> int | None:
    """Return the line of the template where an exception was raised."""
    line: Any = getattr(error, "lineno", None)
    lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if _is_template(frame)]
    return line if isinstance(line, int) else lines[-1] if lines else None


def _is_template(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename == "<template>"


def _rendered(library: Any, line: bytes, left: float) -> dict[str, Any]:
    """Return the reply to a line."""
    request: dict[str, Any] = json.loads(line)
    try:
        try:
            _limit_time(left)
            [text], _ = library.render_jinja_template(
                conversations=[request["messages"]],
                tools=request["tools"],
                chat_template=request["template"],
                add_generation_prompt=request["asks"],
                **request["arguments"],
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _BoundReachedError as error:
        return {"late": True, "line": _line_of(error)}
    except MemoryError as error:
        return {"reason": f"it needs more than {_MEMORY >> 20} MiB of memory", "line": _line_of(error)}
    except Exception as error:  # noqa: BLE001 - of the model's template
        words = next(iter(str(error)[: 4 * _MOST_REASON].strip().splitlines()), type(error).__name__)
        return {"reason": excerpt(words, _MOST_REASON), "line": _line_of(error)}
    longest = _LONGEST + _GROWTH * len(line)
    if len(text) > longest:
        return {"reason": f"it writes {len(text)} characters, more than {longest}", "line": None}
    return {"text": text}


def serve(seconds: float) -> None:
    """Render conversations from standard input, one per line, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    library = _library()
    _limit_memory()
    signal.signal(signal.SIGPROF, _stop)
    left = seconds
    for line in sys.stdin.buffer:
        began, size = time.process_time(), len(line) / (1 << 20)
        reply = _rendered(library, line, left + size * _EACH_MIB)
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        left = min(seconds, left + _EACH + size * _EACH_MIB - (time.process_time() - began))


if __name__ == "__main__":
    serve(float(sys.argv[1]))
