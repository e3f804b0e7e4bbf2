"""The program that `rlinf` runs on a node: reads one request from standard input, does it, answers in lines of JSON.

It travels over ssh to whatever interpreter the node has, so this file and those in `PARTS` of `agent.py` use the
standard library only, and no syntax or function later than Python 3.8. The request may hold the cluster's token:
nothing here prints a request.
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

from rlinf_cli.bootstrap.node import node_inspect, node_links, node_members, node_probe, node_ray


def sync(request: dict[str, Any]) -> dict[str, Any]:
    """Put the archive into the cluster's code folder, in the place of what was there.

    Processes that run keep what they have imported; those that start find the new code.

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
    """Write plain files below `folder`, and nothing else, whatever the archive holds."""
    count = 0
    with tarfile.open(fileobj=data, mode="r:gz") as packed:
        for entry in packed:
            path = os.path.normpath(os.path.join(folder, entry.name))
            source = packed.extractfile(entry) if entry.isfile() else None
            if source is None or not path.startswith(folder + os.sep):
                raise OSError(22, f"`{entry.name}` is no file below the folder")
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
    """One line of the answer."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Do the request on standard input: 0 when it is done, 1 when the answer says what is in the way."""
    request = json.loads(sys.stdin.buffer.readline())
    # The first sign of life: from here on a connection that ends was dropped.
    say({"event": "hello"})
    try:
        answer = VERBS[request["verb"]](request)
    except node_ray.NodeError as error:
        say({"event": "error", **error.answer})
        return 1
    except Exception as error:  # noqa: BLE001 - told to whoever asked, as a traceback here would tell nobody
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
