"""The agent that `rlinf` runs on a node: it reads a request from standard input, and replies in lines of JSON.

It is sent over ssh to the node's interpreter, so this file and those in `PARTS` of `agent.py` use the standard library
only, and no syntax or function later than Python 3.8. The request may hold the cluster's token, so no request is ever
printed.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from typing import Any

from rlinf_cli.cluster.node import node_inspect, node_links, node_members, node_probe, node_ray


def sync(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive into the cluster's code folder, replacing its content.

    Running processes keep their imported modules; new ones import the new code.

    Raises:
        NodeError: it cannot be written.
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
    "inspect": node_inspect.inspect,
    "try": node_inspect.try_out,
    "serve": node_links.serve,
    "measure": node_links.measure,
    "sync": sync,
    "start": node_ray.start,
    "members": node_members.members,
    "end_jobs": node_members.end_jobs,
    "stop": node_ray.stop,
}


def say(line: dict[str, Any]) -> None:
    """Print one line of the reply."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Execute the request on standard input; return 0 if it succeeded, 1 if the reply holds an error."""
    request = json.loads(sys.stdin.buffer.readline())
    # A sign of life: a connection that ends from here on was dropped.
    say({"event": "hello"})
    try:
        answer = VERBS[request["verb"]](request)
    except node_ray.NodeError as error:
        say({"event": "error", **error.answer})
        return 1
    except Exception as error:  # noqa: BLE001 - reported to the caller, as a traceback here would be lost
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        say({
            "event": "error",
            "message": f"{type(error).__name__}: {error}",
            "why": f"in {where.name}, line {where.lineno} of the node agent",
            "help": "",
            "rc": None,
            "lines": "",
        })  # fmt: skip
        return 1
    say({"event": "result", **answer})
    return 0
