"""Running a driver on a node for a user on another machine, and ending it if the connection ends.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
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

from rlinf_cli.cluster.node import node_probe

# Commands in the lines after the request.
INTERRUPT = b"INT"
TERMINATE = b"TERM"
# Seconds between SIGINT, SIGTERM and SIGKILL to a driver.
_GRACE = ((signal.SIGINT, 15.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


def main() -> int:
    """Run the command of the request; return its exit code, or 128 plus the number of the signal that ended it."""
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
        with suppress(OSError):  # it ended before reading all input
            process.stdin.write(data)
            process.stdin.close()
    rc = process.wait()
    # A normal exit would wait for the thread that reads standard input.
    os._exit(rc if rc >= 0 else 128 - rc)


def _obey(process: subprocess.Popen[bytes]) -> None:
    """Execute the commands; the end of input means that the user is gone, which ends the driver."""
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
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, number)
