"""The agent that `rlinf` runs on a node: it reads a request from standard input, and replies in lines of JSON.

It is sent over ssh to the node's interpreter, so this file and those in `PARTS` of `agent.py` use only the standard
library, and no syntax or function later than Python 3.8. A request is never printed, since it may hold the cluster's
token. Instead of answering a request, `drive` runs a driver for a user on another machine until the connection ends.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlinf_cli.cluster.node import node_holdings, node_links, node_probe, node_ray
from rlinf_cli.cluster.node.node_ray import NodeError
from rlinf_core.node import node_facts as facts
from rlinf_core.process import proc as processes

_PAUSE = 0.1


def members(request: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes and jobs that the head lists, after waiting for the nodes `wanted` until `deadline`.

    Raises:
        NodeError: the head cannot be queried.
    """
    folder = facts.folder_of(request["cluster"])
    record = facts.read_record(folder)
    if record is None or not processes.alive(record.get("process")):
        raise NodeError("the head is not up", why="its Ray has ended" if record else "this cluster does not run there")
    env = node_probe.environment(record)
    token = os.path.join(folder, "token")
    env["RAY_AUTH_MODE"] = "token" if os.path.exists(token) else "disabled"
    env["RAY_AUTH_TOKEN_PATH"] = token
    wanted = [str(rank) for rank in request.get("wanted", ())]
    seconds = float(request["deadline"])
    reply = node_probe.ask_interpreter(
        env, "members", record["gcs"], json.dumps(wanted), str(seconds), seconds=seconds + 20
    )
    if "fault" in reply:
        raise NodeError("the head cannot be queried", why=reply["fault"])
    return reply["found"]


def end_jobs(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the drivers on this node to end, and wait for them until the deadline; return the number left.

    The command must match the driver's, since a pid may mean another process, as in a container.
    """
    end = time.monotonic() + float(request["deadline"])
    record = facts.read_record(facts.folder_of(request["cluster"])) or {}
    drivers = {
        job["pid"]: processes.identity(job["pid"])
        for job in request["jobs"]
        if job["address"] == record.get("address") and node_holdings.command_of(job["pid"]) == job["command"]
    }
    processes.send(list(drivers), signal.SIGTERM)
    remaining = [driver for driver in drivers.values() if processes.alive(driver)]
    while remaining and time.monotonic() < end:
        time.sleep(_PAUSE)
        remaining = [driver for driver in remaining if processes.alive(driver)]
    return {"told": len(drivers), "left": len(remaining)}


# A command that may follow the request, in lines of its own.
INTERRUPT = b"INT"
# Signals to a driver, and seconds to the next one: a second SIGINT ends it at once.
_GRACE = ((signal.SIGINT, 15.0), (signal.SIGINT, 10.0), (signal.SIGKILL, 5.0))


def drive() -> int:
    """Run the command of the request; return its exit code, or 128 plus the number of the signal that ended it."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    data = base64.b64decode(request.get("stdin", ""))
    env = node_probe.environment(request)
    argv = [sys.executable if word is None else word for word in request["argv"]]
    try:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE if data else subprocess.DEVNULL, start_new_session=True
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
    """Execute the user's commands, and end the driver at the end of input, when the user is gone."""
    for line in sys.stdin.buffer:
        if line.strip() == INTERRUPT:
            _signal(process, signal.SIGINT)
    for number, seconds in _GRACE:
        _signal(process, number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, number)


def sync(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive into the cluster's code folder, replacing its content.

    Running processes keep their imported modules; new ones import the new code.

    Raises:
        NodeError: the folder cannot be written.
    """
    folder = node_probe.code_folder(request["cluster"])
    part = f"{folder}.part"
    data = io.BytesIO(base64.b64decode(request["archive"]))
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        os.mkdir(part, 0o700)
        count = _unpack(data, part)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise node_ray.no_room(folder, error) from None
    return {"folder": folder, "files": count}


def _unpack(data: io.BytesIO, folder: str) -> int:
    """Extract plain files below `folder`, and nothing else."""
    count = 0
    with tarfile.open(fileobj=data, mode="r:gz") as packed:
        for entry in packed:
            path = os.path.normpath(os.path.join(folder, entry.name))
            source = packed.extractfile(entry) if entry.isfile() else None
            if source is None or not path.startswith(folder + os.sep):
                raise OSError(22, f"`{entry.name}` is not a file below the folder")
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o700)
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(source, file)
            count += 1
    return count


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "probe": node_probe.probe,
    "inspect": node_probe.inspect,
    "try": node_probe.try_out,
    "serve": node_links.serve,
    "measure": node_links.measure,
    "sync": sync,
    "start": node_ray.start,
    "members": members,
    "end_jobs": end_jobs,
    "stop": node_ray.stop,
}


def say(line: dict[str, Any]) -> None:
    """Print one line of the reply."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Execute the request on standard input; return 0 if it succeeded, 1 if the reply holds an error."""
    request = json.loads(sys.stdin.buffer.readline())
    # After this line, the caller knows that the agent ran, so that an end without a result means a lost connection.
    say({"event": "hello"})
    try:
        answer = VERBS[request["verb"]](request)
    except NodeError as error:
        fault = error
    except Exception as error:  # noqa: BLE001 - reported to the caller, as a traceback here would be lost
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"in {where.name}, line {where.lineno} of the node agent"
        fault = NodeError(f"{type(error).__name__}: {error}", why=why)
    else:
        say({"event": "result", **answer})
        return 0
    say({"event": "error", **fault.answer})
    return 1
