"""Files of records, one JSON object per line, written by one process while others read; and the events of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ValidationError

from rlinf_core.foreign.files import (
    MOST_BYTES,
    BadFileError,
    FileModel,
    Moment,
    Step,
    first_fault,
    open_log,
    open_regular,
)
from rlinf_core.runners.storage.durable import append_whole
from rlinf_core.suggest import encodable

T = TypeVar("T")
M = TypeVar("M", bound=FileModel)
# The longest line: rlinf writes no longer ones. A longer line is read in pieces, which are no valid JSON.
_LONGEST_LINE: Final = 16 << 20
_MIB: Final = 1 << 20


class RecordFile(Generic[T]):
    """A file of records. Reading skips a torn last line.

    Args:
        path: the file, which need not exist.
        parse: makes a record from a line; raises ValueError with a description if the line is invalid.
        most: the largest size that is read, in bytes; None for no limit.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], T], most: int | None = None) -> None:
        self.path = path
        self._parse = parse
        self._most = most

    def __iter__(self) -> Iterator[T]:
        """Yield the records, without invalid lines.

        Raises:
            OSError: the file exists but cannot be read, or is larger than `most`.
        """
        return (record for _, _, record in self.placed())

    def placed(self) -> Iterator[tuple[int, int, T]]:
        """Yield each record with the offsets in bytes of the beginning and end of its line; raise as iteration does."""
        stop = 0
        for raw in self._lines():
            start, stop = stop, stop + len(raw)
            try:
                record = self._parse(raw)
            except ValueError:
                continue
            yield start, stop, record

    def with_faults(self, most: int | None = None) -> tuple[list[T], list[str]]:
        """Return the records, and descriptions of at most `most` invalid lines; raise as iteration does."""
        records: list[T] = []
        faults: list[str] = []
        for number, raw in enumerate(self._lines(), start=1):
            try:
                records.append(self._parse(raw))
            except ValueError as error:
                if most is None or len(faults) < most:
                    faults.append(f"line {number} of {self.path.name} was skipped: {error}")
        return records, faults

    def last(self, size: int) -> Iterator[T]:
        """Yield the records in the last `size` bytes, without invalid lines; raise as iteration does."""
        for raw in self._lines(size):
            with suppress(ValueError):
                yield self._parse(raw)

    def append(self, line: str) -> None:
        """Append a line as a whole or not at all. The file must have no other writer.

        Raises:
            OSError: the line cannot be written.
        """
        descriptor = open_log(self.path.parent, self.path.name)
        try:
            append_whole(descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)

    def _lines(self, size: int | None = None) -> Iterator[bytes]:
        """Yield the lines except a torn last one; with `size`, only the whole lines in the last `size` bytes."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            whole = os.fstat(file.fileno()).st_size
            if self._most is not None and whole > self._most:
                raise BadFileError(self.path, f"is larger than {self._most // _MIB} MiB")
            if size is not None and whole > size:
                file.seek(whole - size)
                file.readline(_LONGEST_LINE)
            while raw := file.readline(_LONGEST_LINE):
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
                    return
                yield raw


def parse_model(raw: bytes, model: type[M]) -> M:
    """Return the record in a line, as an instance of `model`.

    Raises:
        ValueError: the line is no such record; the message names the field and its value.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


# The events of a run: start, checkpoints, restarts and end, one JSON object per line in `events.jsonl`.
#
#     {"time": 1773482102.5, "kind": "restarted", "step": 20, "text": "`env:1` died in `interact`", "details": []}
#
# They are a stable, machine-readable form of the driver's log.


FILE: Final = "events.jsonl"

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
# The beginning of a line of details that names a folder of evidence.
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
        return [], [f"{FILE} cannot be read: it {error.strerror}"]


def _events_in(folder: Path) -> RecordFile[RunEvent]:
    return RecordFile(folder / FILE, lambda raw: parse_model(raw, RunEvent), MOST_BYTES)
