"""The private folders of this user's drivers on this machine, and the records of running jobs in them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import ClusterError
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.node.node_facts import make_private, private_base
from rlinf_core.node.node_processes import alive, identity, reap

_OWNER_FILE = "owner"
_JOB_FILE = "job"
# A TMPDIR that leaves room for Ray's sockets; in the place of a longer one it is /tmp.
_LONGEST_TMPDIR = 16


def new_folder() -> Path:
    """Return a private folder for this process; those whose owners are gone are removed."""
    base = base_folder()
    for folder in base.iterdir():
        if (folder / _OWNER_FILE).exists() and not is_owned(folder):
            reap(str(folder))
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # In one step: another process that starts now must not take it for left behind.
    part = folder / f"{_OWNER_FILE}.part"
    part.write_text(identity(os.getpid()) or "", encoding="ascii")
    part.rename(folder / _OWNER_FILE)
    return folder


def base_folder() -> Path:
    """Return the folder that they are in.

    Raises:
        ClusterError: it cannot be made, or is not this user's alone.
    """
    base = Path(private_base())
    try:
        private = make_private(str(base))
    except OSError as error:
        raise ClusterError(
            f"`{base}` cannot be used",
            why=error.strerror,
            help=f"set TMPDIR to a folder of your own with at most {_LONGEST_TMPDIR} characters, for Ray's sockets",
        ) from None
    if not private:
        raise ClusterError(
            f"`{base}` is not a private folder of yours", help="remove it, or set TMPDIR to a folder of your own"
        )
    return base


def is_owned(folder: Path) -> bool:
    """Return whether the process that made the folder lives."""
    try:
        owner = (folder / _OWNER_FILE).read_text(encoding="ascii")
    except OSError:
        return False
    return alive(owner)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A running job, its secret in hex and its start in seconds since 1970; `pid` is that of its driver."""

    job: str
    secret: str = field(repr=False)
    manager: EndpointInfo
    address: str
    pid: int
    started: float

    def write(self, folder: Path) -> None:
        """Put the record into the private folder of the driver, readable by its user only."""
        part = folder / f"{_JOB_FILE}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(part, folder / _JOB_FILE)


def running_jobs() -> list[JobRecord]:
    """Return the jobs whose drivers run on this machine under this user, the youngest first."""
    return sorted(_records(), key=lambda record: -record.started)


def _records() -> Iterator[JobRecord]:
    for folder in base_folder().iterdir():
        if not is_owned(folder):
            continue
        try:
            data: dict[str, Any] = load_json_object((folder / _JOB_FILE).read_bytes())
            manager = EndpointInfo(**data.pop("manager"))
            yield JobRecord(manager=manager, **data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a driver that has launched nothing yet, or one of another version
