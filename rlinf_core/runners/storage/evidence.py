"""`evidence/TIME/` of a run folder: what could be seen of a failure while its processes still lived.

evidence/20261126-013742/
  failure.json            what failed, with the whole error of each process; see `EvidenceFile`
  waits.json, stacks.txt  who waited for whom, and in which frame
  memory.json             of processes, control group and /dev/shm
  logs/, ray/, kernel.txt ends of logs, and the kernel's lines about our processes
  versions.json, config.yaml, in_flight.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core.foreign.file_models import FileModel, Moment, Name, Step, read_model

FOLDER: Final = "evidence"
FAILURE: Final = "failure.json"
SCHEMA: Final = "rlinf.evidence/1"
# The first ones and the newest are kept.
MOST_BUNDLES: Final = 8
# Of one bundle, and of a file in it.
MOST_BYTES: Final = 20 << 20
MOST_FILE_BYTES: Final = 1 << 20
_MOST_READ: Final = 64

Text = Annotated[str, Field(max_length=1 << 20)]


class FailedProcess(FileModel):
    """A process that failed.

    Attributes:
        name: `EnvGroup:0`, or `the driver`.
        component, rank: the component and rank of a worker.
        method: the called method; null for the driver.
        place: where it ran, in words.
        type: the type of its error, as in `ValueError`.
        bases: the names of that type and of those that it derives from.
        text, traceback: the whole error.
        why, help: the cause and the remedy in an error of rlinf's own.
        position: `FILE:LINE in FUNCTION` of the frame that raised it, the user's own if there is one.
        consequence: whether another failure caused it.
        died: whether the process itself ended.
        signal: the signal that ended it, as in `SIGKILL`; null if none did, or it is unknown.
        exit_code: the exit code that it ended with; null likewise.
        out_of_memory: the kernel's words on a kill for memory that named this process or its control group, or null.
    """

    name: Name
    component: Name | None = None
    rank: Annotated[int, Field(ge=0)] | None = None
    method: Name | None = None
    place: Text | None = None
    type: Name = ""
    bases: list[Name] = Field(default_factory=list[Name])
    text: Text = ""
    traceback: Text = ""
    why: Text = ""
    help: Text = ""
    position: Text = ""
    consequence: bool = False
    died: bool = False
    signal: Annotated[str, Field(max_length=32)] | None = None
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    out_of_memory: Text | None = None


class EvidenceFile(FileModel):
    """The content of `failure.json`.

    Attributes:
        time: when it was written, in seconds since 1970.
        step: the last finished step.
        what: the first failure in one line.
        failures: root causes first.
        missing: what could not be collected, each with the reason.
    """

    schema_: Annotated[Literal["rlinf.evidence/1"], Field(alias="schema")]
    time: Moment
    step: Step = 0
    what: Text = ""
    failures: list[FailedProcess] = Field(default_factory=list[FailedProcess])
    missing: list[Text] = Field(default_factory=list[Text])


class Bundle(NamedTuple):
    """A folder of evidence, and what failed."""

    path: Path
    content: EvidenceFile

    @property
    def first(self) -> FailedProcess | None:
        """The first failure."""
        return self.content.failures[0] if self.content.failures else None


def read_bundles(run_folder: Path) -> tuple[list[Bundle], list[str]]:
    """Return the evidence of a run, oldest first, and the errors of bundles that cannot be read."""
    bundles: list[Bundle] = []
    faults: list[str] = []
    for path in bundle_folders(run_folder)[:_MOST_READ]:
        try:
            bundles.append(Bundle(path, read_model(path / FAILURE, EvidenceFile, MOST_BYTES)))
        except OSError as error:
            faults.append(f"{FOLDER}/{path.name}/{FAILURE} is skipped: it {error.strerror}")
    bundles.sort(key=lambda bundle: (bundle.content.time, bundle.path.name))
    return bundles, faults


def bundle_folders(run_folder: Path) -> list[Path]:
    """Return the folders of evidence of a run, by name, which begins with the time; without links and partial ones."""
    try:
        names = sorted(entry.name for entry in os.scandir(run_folder / FOLDER) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [run_folder / FOLDER / name for name in names if not name.startswith(".")]
