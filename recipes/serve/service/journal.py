"""Records of sessions on disk, from which a later start of the server continues.

Each session has a folder with the file `journal`: frames of a JSON object and bytes, each with a checksum. A frame that
a killed process has not written to its end is cut off. Frames are handed to the operating system and not synced: they
outlive the process, and not always the machine.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_core.errors import RunError
from rlinf_core.foreign.files import open_regular
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.runners.storage.durable import append_whole, remove_tree, write_whole

LOGGER: Final = logging.getLogger("rlinf")
JOURNAL: Final = "journal"
_SESSION: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")
_HEAD: Final = struct.Struct("<III")  # checksum of both parts, bytes of the JSON object, bytes after it
_SMALLEST: Final = 8 << 20


class JournalEntry(NamedTuple):
    """An event in the life of a session.

    Attributes:
        kind: the kind of the event: session, sampler, request, outcome or saved.
        fields: what JSON holds.
        body: further bytes.
    """

    kind: str
    fields: Mapping[str, Any]
    body: bytes = b""


class Journal:
    """The files of all sessions.

    Args:
        root: folder of the sessions' folders.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # Bytes of each file, and how many it had when it was compacted last.
        self._sizes: dict[str, int] = {}
        self._compacted: dict[str, int] = {}

    def folder(self, session_id: str) -> Path:
        """Return the folder of a session, which goes with it."""
        return self._root / session_id

    def begin(self, session_id: str, tenant: str) -> None:
        """Begin the file of a session.

        Raises:
            RunError: it cannot be written.
        """
        self._sizes[session_id] = 0
        self.append(session_id, JournalEntry("session", {"tenant": tenant}))

    def append(self, session_id: str, entry: JournalEntry) -> int:
        """Write an event of a session, unless the session has ended; return its bytes.

        Raises:
            RunError: it cannot be written.
        """
        if session_id not in self._sizes:
            return 0
        frame, folder = _frame(entry), self.folder(session_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / JOURNAL).open("ab", buffering=0) as file:
                append_whole(file.fileno(), frame)
        except OSError as error:
            raise RunError(
                f"the sessions in `{self._root}` cannot be written", why=write_fault(self._root, error)
            ) from error
        self._sizes[session_id] += len(frame)
        return len(frame)

    def sessions(self) -> Iterator[tuple[str, list[JournalEntry]]]:
        """Return the sessions of earlier starts with their events, which resume from here.

        Raises:
            RunError: a file cannot be read.
        """
        try:
            for folder in sorted(self._root.iterdir()) if self._root.is_dir() else ():
                if _SESSION.fullmatch(folder.name):
                    yield folder.name, self._opened(folder)
        except OSError as error:
            raise RunError(
                f"the sessions in `{self._root}` cannot be read", why=write_fault(self._root, error)
            ) from error

    def _opened(self, folder: Path) -> list[JournalEntry]:
        file = folder / JOURNAL
        entries, whole = _entries(file) if file.exists() else ([], 0)
        if file.exists() and whole < file.stat().st_size:
            LOGGER.warning("the last event of session %s was not written to its end", folder.name)
            with file.open("r+b") as opened:
                opened.truncate(whole)
        self._sizes[folder.name] = whole
        return entries

    def has_grown(self, session_id: str) -> bool:
        """Return whether a file is worth to be compacted."""
        return self._sizes.get(session_id, 0) > max(_SMALLEST, 2 * self._compacted.get(session_id, 0))

    def compact(self, session_id: str, kept: Callable[[JournalEntry], JournalEntry | None]) -> None:
        """Rewrite the file of a session, with what is kept of each event.

        Raises:
            RunError: it cannot be read or written.
        """
        file = self.folder(session_id) / JOURNAL
        try:
            entries, _ = _entries(file)
            frames = b"".join(_frame(entry) for entry in map(kept, entries) if entry is not None)
            write_whole(file, frames)
        except OSError as error:
            raise RunError(
                f"the sessions in `{self._root}` cannot be written", why=write_fault(self._root, error)
            ) from error
        self._sizes[session_id] = self._compacted[session_id] = len(frames)

    def end(self, session_id: str) -> None:
        """Remove a session."""
        self._sizes.pop(session_id, None)
        self._compacted.pop(session_id, None)
        remove_tree(self.folder(session_id))


def _frame(entry: JournalEntry) -> bytes:
    head = json.dumps({"kind": entry.kind, **entry.fields}).encode()
    return _HEAD.pack(zlib.crc32(head + entry.body), len(head), len(entry.body)) + head + entry.body


def _entries(file: Path) -> tuple[list[JournalEntry], int]:
    """Return the events in a file, and how many of its bytes are whole frames. A frame is read once it fits the file.

    Raises:
        OSError: it cannot be read.
    """
    entries: list[JournalEntry] = []
    at = 0
    with open_regular(file) as opened:
        end = opened.seek(0, 2)
        opened.seek(0)
        while len(head := opened.read(_HEAD.size)) == _HEAD.size:
            checksum, size, attached = _HEAD.unpack(head)
            if size + attached > end - opened.tell():
                break
            frame = opened.read(size + attached)
            if zlib.crc32(frame) != checksum:
                break
            try:
                fields = load_json_object(frame[:size])
            except BadJsonError:
                break
            entries.append(JournalEntry(str(fields.pop("kind", "")), fields, frame[size:]))
            at = opened.tell()
    return entries, at
