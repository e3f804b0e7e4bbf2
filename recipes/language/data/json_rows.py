"""Rows of JSON files: one object per line, or a list of objects, optionally gzip-compressed."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from rlinf_core import ConfigError
from rlinf_core.foreign.budget import Budget, OverBudgetError, in_words, json_size
from rlinf_core.foreign.files import open_regular
from rlinf_core.foreign.strict_json import BadJsonError, load_json, wide_encoding

_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_LONGEST_LINE: Final = 16 << 20
# The memory of a row besides its values, in bytes: an object and its place.
_ROW: Final = 192
# A blank line costs this much of the budget, as reading it takes time.
_BLANK: Final = 1 << 10
# Signatures of unsupported compressions.
_COMPRESSIONS = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


class WrittenFloat(float):
    """A number that keeps its spelling in the file: `1.10` is not `1.1`, and `6.02e23` keeps its form."""

    def __new__(cls, text: str) -> WrittenFloat:
        """Parse a number and keep its text."""
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __str__(self) -> str:
        """Return the number as written."""
        return self.text

    def __reduce__(self) -> tuple[type[WrittenFloat], tuple[str]]:
        """Pickle the number by its text."""
        return WrittenFloat, (self.text,)


def json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, and the row.

    Args:
        file: a UTF-8 file, with or without a byte order mark, optionally gzip-compressed.

    Raises:
        ConfigError: the file has another compression or format, is not UTF-8, or exceeds its memory budget; or a row is
            not a JSON object, contains a NaN, or exceeds 16 MiB.
        OSError: the file cannot be read.
    """
    with open_regular(file) as opened:
        start = opened.read(8)
    if start.startswith(_PARQUET):
        raise ConfigError(f"the data file `{file}` is a Parquet file", help="give it a name that ends in `.parquet`")
    other = next((name for signature, name in _COMPRESSIONS.items() if start.startswith(signature)), None)
    if other is not None:
        raise ConfigError(f"the data file `{file}` is compressed by {other}", help="unpack it, or compress it by gzip")
    try:
        with open_regular(file) as raw:
            binary = gzip.open(raw, "rb") if start.startswith(_GZIP) else raw  # noqa: SIM115 - closed below
            wide = wide_encoding(cast("io.BufferedReader", binary).peek(4))
            if wide is not None:
                raise ConfigError(
                    f"the data file `{file}` is {wide} text, not UTF-8",
                    help=f"convert it: `iconv -f {wide} -t UTF-8`",
                )
            # `utf-8-sig` skips a byte order mark.
            with io.TextIOWrapper(cast("io.BufferedReader", binary), encoding="utf-8-sig") as lines:
                yield from _rows(file, lines, Budget.of_files(file))
    except OverBudgetError as error:
        raise ConfigError(f"the data file `{file}` {error}", help="split it into several files") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the data file `{file}` is not UTF-8 text", help="convert it: `iconv -t UTF-8`") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(f"the data file `{file}` is damaged", why=str(error), help="copy it again") from None


def _rows(file: Path, lines: IO[str], budget: Budget) -> Iterator[tuple[str, Mapping[str, Any]]]:
    first = True
    number = 0
    while line := lines.readline(_LONGEST_LINE + 1):
        number += 1
        place = f"{file}:{number}"
        if first and line.lstrip().startswith("["):
            yield from _listed(file, _whole(line, lines, budget), number)
            return
        if len(line) > _LONGEST_LINE:
            raise ConfigError(
                f"{place}: the line is longer than {in_words(_LONGEST_LINE)}", help="write one JSON object per line"
            )
        is_blank = not line.strip()
        budget.take(_BLANK if is_blank else _ROW + json_size(line), f"line {number}")
        if not is_blank:
            first = False
            yield place, _object(_parsed(place, line, "line", "one JSON object per line"), place, "line")


def _whole(line: str, lines: IO[str], budget: Budget) -> str:
    """Return the first line and the rest of a file."""
    parts = [line]
    while part := lines.read(_LONGEST_LINE):
        parts.append(part)
        budget.take(json_size(part))
    budget.take(json_size(line))
    return "".join(parts)


def _listed(file: Path, text: str, number: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    parsed = _parsed(f"{file}:{number}", text, "list", "a list of JSON objects")
    for index, item in enumerate(cast("list[object]", parsed)):
        place = f"{file}, item {index}"
        yield place, _object(item, place, "row")


def _object(row: object, place: str, what: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: the {what} is not a JSON object", help="write `{...}`")
    return cast("dict[str, Any]", row)


def _parsed(place: str, text: str, what: str, remedy: str) -> object:
    try:
        return load_json(text.strip(), number=WrittenFloat)
    except BadJsonError as error:
        raise ConfigError(
            f"{place}: the {what} {error}",
            help=f"write {remedy}; numbers as `1.5`; values that JSON lacks, such as NaN, as text",
        ) from None
