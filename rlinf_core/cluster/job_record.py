"""Records by which other processes of a user find running jobs: a file in the private folder of each job's driver."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.manager.folders import base_folder, is_owned

_NAME = "job"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A running job.

    Attributes:
        job: its name.
        secret: what its processes prove to know, in hex.
        manager: where its manager is reached.
        address: where its Ray is reached.
        pid: of its driver.
        started: when the record was written, in seconds since 1970.
    """

    job: str
    secret: str = field(repr=False)
    manager: EndpointInfo
    address: str
    pid: int
    started: float

    def write(self, folder: Path) -> None:
        """Put the record into the private folder of the driver, readable by its user only."""
        part = folder / f"{_NAME}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(part, folder / _NAME)


def running_jobs() -> list[JobRecord]:
    """Return the jobs whose drivers run on this machine under this user, the youngest first."""
    return sorted(_records(), key=lambda record: -record.started)


def _records() -> Iterator[JobRecord]:
    for folder in base_folder().iterdir():
        if not is_owned(folder):
            continue
        try:
            data: dict[str, Any] = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            manager = EndpointInfo(**data.pop("manager"))
            yield JobRecord(manager=manager, **data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a driver that has launched nothing yet, or one of another version
