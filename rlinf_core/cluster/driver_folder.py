"""The private folders of this user's drivers on this machine, and the records of running jobs in them."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import ClusterError
from rlinf_core.foreign.files import read_json_object
from rlinf_core.node import node_facts
from rlinf_core.node.node_facts import make_private, private_base
from rlinf_core.node.process_identity import Presence, ProcessIdentity, look, own_identity
from rlinf_core.process.proc import boot_id, reap

_OWNER_FILE = "owner"
_JOB_FILE = "job"
_OWNER = TypeAdapter(ProcessIdentity)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The longest TMPDIR that leaves room for the paths of Ray's sockets.
_LONGEST_TMPDIR = 16


def new_folder() -> Path:
    """Return a new private folder for this process; remove those of dead processes."""
    base = base_folder()
    for folder in base.iterdir():
        if is_left_behind(folder):
            reap(str(folder))
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # Left open on purpose: the lock ends with the process, and is visible from containers that share the folder.
    fcntl.flock(os.open(folder, _FOLDER), fcntl.LOCK_EX)
    # Atomically and last, so that another starting process does not remove the folder as left behind.
    node_facts.write_private(str(folder / _OWNER_FILE), json.dumps(own_identity()._asdict()))
    return folder


def is_left_behind(folder: Path) -> bool:
    """Return whether the process that made the folder is certainly gone.

    It is if its lock is free, and the process either belongs to the current boot or has verifiably ended.
    """
    owner = _owner(folder)
    if owner is None:
        return False
    try:
        lock = os.open(folder, _FOLDER)
        written = (folder / _OWNER_FILE).stat().st_mtime
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    presence = look(owner, written)
    return presence is Presence.GONE or (presence is Presence.UNKNOWN and bool(owner.boot) and owner.boot == boot_id())


def base_folder() -> Path:
    """Return the folder that holds the private folders of drivers.

    Raises:
        ClusterError: it cannot be made, or is not private to this user.
    """
    base = Path(private_base())
    try:
        private = make_private(str(base))
    except OSError as error:
        raise ClusterError(
            f"`{base}` cannot be used",
            why=error.strerror,
            help=f"set TMPDIR to your own folder with at most {_LONGEST_TMPDIR} characters, for Ray's sockets",
        ) from None
    if not private:
        raise ClusterError(
            f"`{base}` is not a private folder of yours", help="remove it, or set TMPDIR to your own folder"
        )
    return base


def is_owned(folder: Path) -> bool:
    """Return whether the process that made the folder is alive and visible."""
    owner = _owner(folder)
    return owner is not None and look(owner) is Presence.ALIVE


def folders_of(process: ProcessIdentity) -> list[Path]:
    """Return the private folders of a driver on this machine, one for each Ray that it uses."""
    return [folder for folder in base_folder().iterdir() if _owner(folder) == process]


def _owner(folder: Path) -> ProcessIdentity | None:
    try:
        return _OWNER.validate_python(read_json_object(folder / _OWNER_FILE, 1 << 16), strict=True)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record of a running job: its secret in hex, its start in seconds since 1970, and the `pid` of its driver."""

    job: str
    secret: str = field(repr=False)
    manager: EndpointInfo
    address: str
    pid: int
    started: float

    def write(self, folder: Path) -> None:
        """Write the record to the driver's private folder, readable by its user only."""
        node_facts.write_private(str(folder / _JOB_FILE), json.dumps(asdict(self)))


def running_jobs() -> list[JobRecord]:
    """Return the jobs of this user's drivers on this machine, newest first."""
    return sorted(_records(), key=lambda record: -record.started)


def _records() -> Iterator[JobRecord]:
    for folder in base_folder().iterdir():
        if not is_owned(folder):
            continue
        try:
            data = read_json_object(folder / _JOB_FILE)
            manager = EndpointInfo(**data.pop("manager"))
            yield JobRecord(manager=manager, **data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its driver has not launched anything yet, or runs another version
