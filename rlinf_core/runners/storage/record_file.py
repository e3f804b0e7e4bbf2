"""Files of records, one JSON object in each line, which one process writes while others read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ValidationError

from rlinf_core.foreign.file_models import FileModel, first_fault
from rlinf_core.foreign.files import BadFileError, open_log, open_regular
from rlinf_core.runners.storage.durable import append_whole

T = TypeVar("T")
M = TypeVar("M", bound=FileModel)
# A longer line is not ours; it is read in pieces, none of which is JSON.
_LONGEST_LINE: Final = 16 << 20
_MIB: Final = 1 << 20


class RecordFile(Generic[T]):
    """A file of records. It is read as far as it is whole: a torn last line is passed over.

    Args:
        path: the file, which need not exist.
        parse: makes the record of a line; a ValueError says in words what is wrong with the line.
        most: the largest size that is read, in bytes; None: any, for files that are read piece by piece.
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
        """Yield each record with the bytes at which its line begins and ends; raise as iteration does."""
        stop = 0
        for raw in self._lines():
            start, stop = stop, stop + len(raw)
            try:
                record = self._parse(raw)
            except ValueError:
                continue
            yield start, stop, record

    def with_faults(self, most: int | None = None) -> tuple[list[T], list[str]]:
        """Return the records, and at most `most` of the errors of invalid lines in words; raise as iteration does."""
        records: list[T] = []
        faults: list[str] = []
        for number, raw in enumerate(self._lines(), start=1):
            try:
                records.append(self._parse(raw))
            except ValueError as error:
                if most is None or len(faults) < most:
                    faults.append(f"line {number} of {self.path.name} was skipped: {error}")
        return records, faults

    def append(self, line: str) -> None:
        """Append a line as a whole or not at all. Nobody else may write to the file.

        Raises:
            OSError: it cannot be written.
        """
        descriptor = open_log(self.path.parent, self.path.name)
        try:
            append_whole(descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines but a torn last one."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            if self._most is not None and os.fstat(file.fileno()).st_size > self._most:
                raise BadFileError(self.path, f"is larger than {self._most // _MIB} MiB")
            while raw := file.readline(_LONGEST_LINE):
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
                    return
                yield raw


def parse_model(raw: bytes, model: type[M]) -> M:
    """Return the record of a line that is a model's.

    Raises:
        ValueError: it is none; the message names the field and its value.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
