"""Running a driver on a node for somebody who is on another machine, and ending it when they are gone.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from rlinf_cli.bootstrap.node import node_probe

# Lines that come after the request, each one thing to do.
INTERRUPT = b"INT"
TERMINATE = b"TERM"
# Seconds between asking a driver to end, telling it to, and ending it.
_GRACE = ((signal.SIGINT, 15.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


def main() -> int:
    """Run the command of the request; its exit code, or 128 and the number of the signal that ended it."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    data = base64.b64decode(request.get("stdin", ""))
    env = node_probe.environment(request)
    argv = [sys.executable if word is None else word for word in request["argv"]]
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=request.get("cwd") or None,
            stdin=subprocess.PIPE if data else subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return 127
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    if process.stdin is not None:
        with suppress(OSError):  # it ended before it had read all
            process.stdin.write(data)
            process.stdin.close()
    rc = process.wait()
    # Not by way of the interpreter's end, which would wait for the thread that reads standard input.
    os._exit(rc if rc >= 0 else 128 - rc)


def _obey(process: subprocess.Popen[bytes]) -> None:
    """Do what the lines say; their end means that nobody is there any more, and so must the driver."""
    for line in sys.stdin.buffer:
        number = {INTERRUPT: signal.SIGINT, TERMINATE: signal.SIGTERM}.get(line.strip())
        if number is not None:
            _send(process, number)
    for number, seconds in _GRACE:
        _send(process, number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):  # it ended by itself
        os.killpg(process.pid, number)
