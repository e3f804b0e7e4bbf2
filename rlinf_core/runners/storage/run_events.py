"""Files about the course of a run: `events.jsonl`, `evidence/` and `quarantine/` of its folder.

events.jsonl              its start, checkpoints, restarts and end, one JSON object per line; see `RunEvent`: a stable,
                          machine-readable form of the driver's log
evidence/20261126-013742/   the data about a failure, collected while its processes still lived
  failure.json              the failures, with the whole error of each process; see `EvidenceFile`
  waits.json, stacks.txt    the waits of processes, and their stacks
  memory.json               the memory of processes, control group and /dev/shm
  logs/, ray/, kernel.txt   ends of logs, and the kernel's lines about the job's processes
  versions.json, config.yaml, in_flight.json
quarantine/task-17.json     an item that is no longer processed; see `QuarantinedItem`
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core.foreign.files import MOST_BYTES, FileModel, Moment, Name, Step, make_folder, read_model
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.durable import RecordFile, parse_model
from rlinf_core.suggest import encodable

EVENTS: Final = "events.jsonl"

STARTED: Final = "started"
RESUMED: Final = "resumed"
RESTARTED: Final = "restarted"
# Only the dead workers were started again.
RELAUNCHED: Final = "relaunched"
# A spare replaces a lost node, or a node is back.
NODES: Final = "nodes"
# The fates of the items that were in flight at the checkpoint from which a run resumes.
ITEMS: Final = "items"
# An environment has an error in its own code.
ENVIRONMENT: Final = "environment"
# An evaluation lacks some of the requested episodes or samples.
INCOMPLETE: Final = "incomplete"
FINISHED: Final = "finished"
INTERRUPTED: Final = "interrupted"
FAILED: Final = "failed"
# The folder of evidence, and the beginning of a line of details that names a folder in it.
EVIDENCE: Final = "evidence"


class RunEvent(FileModel):
    """An event of a run.

    Attributes:
        time: the time in seconds since 1970.
        kind: one of the kinds above.
        step: the last finished step.
        text: what happened, in one line.
        details: further lines: location, cause, remedy.
    """

    time: Moment
    kind: str
    step: Step
    text: str
    details: tuple[str, ...]


def append_event(folder: Path, kind: str, step: int, text: str, details: Sequence[str] = ()) -> None:
    """Append an event of the run in `folder`.

    Raises:
        OSError: the event cannot be written.
    """
    text, details = encodable(text), list(map(encodable, details))
    event = {"time": time.time(), "kind": kind, "step": step, "text": text, "details": details}
    _events_in(folder).append(json.dumps(event, ensure_ascii=False))


def story_with_faults(folder: Path) -> tuple[list[RunEvent], list[str]]:
    """Return the events of the run in `folder`, in order, and the errors of skipped lines."""
    try:
        return _events_in(folder).with_faults()
    except OSError as error:
        return [], [f"{EVENTS} cannot be read: it {error.strerror}"]


def _events_in(folder: Path) -> RecordFile[RunEvent]:
    return RecordFile(folder / EVENTS, lambda raw: parse_model(raw, RunEvent), MOST_BYTES)


FAILURE: Final = "failure.json"
EVIDENCE_SCHEMA: Final = "rlinf.evidence/1"
# The most bundles: the first and the newest ones are kept.
MOST_BUNDLES: Final = 8
# The most bytes of a bundle, and of a file in it.
MOST_BUNDLE_BYTES: Final = 20 << 20
MOST_FILE_BYTES: Final = 1 << 20
_MOST_READ: Final = 64
QUARANTINE: Final = "quarantine"
_MOST_ITEM_BYTES: Final = 1 << 20
_MOST_ITEMS: Final = 1000

Text = Annotated[str, Field(max_length=1 << 20)]


class FailedProcess(FileModel):
    """A process that failed.

    Attributes:
        name: `EnvGroup:0`, or `the driver`.
        component, rank: the component and rank of a worker.
        method: the called method; null for the driver.
        place: a description of where it ran.
        type: the type of its error, for example `ValueError`.
        bases: the names of that type and of its base classes.
        code: the code of an rlinf error that has one; see `RLinfError`.
        text, traceback: the whole error.
        why, help: the cause and the remedy in an rlinf error.
        position: `FILE:LINE in FUNCTION` of the frame that raised it, of user code if possible.
        consequence: whether another failure caused it.
        died: whether the process itself ended.
        signal: the signal that ended it, for example `SIGKILL`; null if none did, or it is unknown.
        exit_code: its exit code; null likewise.
        out_of_memory: a text about a kill for lack of memory in this process or its control group, or null.
    """

    name: Name
    component: Name | None = None
    rank: Annotated[int, Field(ge=0)] | None = None
    method: Name | None = None
    place: Text | None = None
    type: Name = ""
    bases: list[Name] = Field(default_factory=list[Name])
    code: Name = ""
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
        time: the time when it was written, in seconds since 1970.
        step: the last finished step.
        what: the first failure in one line.
        failures: the failures, root causes first.
        missing: the parts that could not be collected, each with the reason.
    """

    schema_: Annotated[Literal["rlinf.evidence/1"], Field(alias="schema")]
    time: Moment
    step: Step = 0
    what: Text = ""
    failures: list[FailedProcess] = Field(default_factory=list[FailedProcess])
    missing: list[Text] = Field(default_factory=list[Text])


class Bundle(NamedTuple):
    """A folder of evidence, with the content of its `failure.json`."""

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
            bundles.append(Bundle(path, read_model(path / FAILURE, EvidenceFile, MOST_BUNDLE_BYTES)))
        except OSError as error:
            faults.append(f"{EVIDENCE}/{path.name}/{FAILURE} is skipped: it {error.strerror}")
    bundles.sort(key=lambda bundle: (bundle.content.time, bundle.path.name))
    return bundles, faults


def bundle_folders(run_folder: Path) -> list[Path]:
    """Return a run's folders of evidence in the order of their names, that is, of time; no links or partial ones."""
    try:
        names = sorted(entry.name for entry in os.scandir(run_folder / EVIDENCE) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [run_folder / EVIDENCE / name for name in names if not name.startswith(".")]


class QuarantinedItem(FileModel):
    """A quarantined item.

    Attributes:
        kind: the kind of the item, for example `task`.
        item: the name of the item, for example the number of its row in the data.
        step: the step for which it was processed; 0 for an evaluation.
        time: the time when it was quarantined, in seconds since 1970.
        deaths: descriptions of the deaths of processes with the item, one line each.
        replay: the data with which `rlinf why --replay` repeats it; empty if it cannot be repeated alone.
    """

    schema_: Annotated[Literal["rlinf.quarantine/1"], Field(alias="schema")]
    kind: Name
    item: Name
    step: Step = 0
    time: Moment
    deaths: list[Annotated[str, Field(max_length=1 << 16)]] = Field(default_factory=list[str])
    replay: dict[str, Any] = Field(default_factory=dict[str, Any])


def quarantine(
    run_folder: Path, kind: str, item: str, step: int, deaths: Sequence[str], replay: Mapping[str, Any] | None = None
) -> Path:
    """Write the file of a quarantined item; return its path.

    Raises:
        OSError: the file cannot be written.
    """
    content = QuarantinedItem.model_validate(
        {
            "schema": "rlinf.quarantine/1",
            "kind": kind,
            "item": item,
            "step": step,
            "time": time.time(),
            "deaths": [hidden(death)[: 1 << 16] for death in deaths],
            "replay": dict(replay or {}),
        }
    )
    make_folder(run_folder / QUARANTINE)
    path = run_folder / QUARANTINE / f"{kind}-{item}.json"
    durable.write_whole(path, content.model_dump_json(by_alias=True, indent=1) + "\n")
    return path


def read_quarantine(run_folder: Path) -> dict[str, QuarantinedItem]:
    """Return the items that a run has quarantined, by the name of their file; unreadable files are left out."""
    items: dict[str, QuarantinedItem] = {}
    try:
        with os.scandir(run_folder / QUARANTINE) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_ITEMS) if entry.name.endswith(".json"))
    except OSError:
        return items
    for name in names:
        try:
            items[name] = read_model(run_folder / QUARANTINE / name, QuarantinedItem, _MOST_ITEM_BYTES)
        except OSError:
            continue
    return items
