"""Taking code from the machine that `rlinf up --sync` runs on.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import tarfile
from typing import Any

from rlinf_core.bootstrap import node_facts as facts
from rlinf_core.bootstrap import node_ray


def sync(request: dict[str, Any]) -> dict[str, Any]:
    """Put the archive into the cluster's code folder, in the place of what was there.

    Processes that run keep what they have imported; those that start find the new code.

    Raises:
        NodeError: it cannot be written.
    """
    folder = facts.code_folder(request["cluster"])
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
