"""Rows of data files as Python values: JSON, one object per line or a list, optionally gzip-compressed, and Parquet."""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from recipes.language.text.chat_messages import ALIGNED_SUFFIX
from recipes.training.parquet_claims import take_parquet
from rlinf_core import ConfigError
from rlinf_core.config.sections.values import ensure_here
from rlinf_core.foreign.budget import VALUE_BYTES, Budget, OverBudgetError, in_words, json_size
from rlinf_core.foreign.files import check_regular, open_regular
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
# Columns of media beside the text of a row, which text models do not see.
_COLUMNS: Final = ("images", "image", "videos", "video", "audios", "audio")
# Placeholders of media in a text.
_MARKS: Final = ("<image>", "<video>", "<audio>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>")


def located_rows(path: str, most: int | None = None) -> list[tuple[str, Mapping[str, Any]]]:
    """Return place and content of the rows of a `.jsonl` or `.parquet` file, at most the first `most`.

    Raises:
        ConfigError: the file cannot be read, is empty, or a row is not an object or has media.
    """
    ensure_here(path)
    file = Path(path)
    try:
        if file.suffix == ALIGNED_SUFFIX:
            pairs = [(f"{path}, row {number}", row) for number, row in enumerate(_parquet_rows(file, most))]
        else:
            pairs = list(itertools.islice(_json_rows(file), most))
    except OSError as error:
        why, help = error.strerror or str(error), "name its files of rows, JSONL or Parquet" if file.is_dir() else None
        raise ConfigError(f"the data file `{path}` cannot be read", why=why, help=help) from None
    if not pairs:
        raise ConfigError(f"the data file `{path}` has no rows", help="give a file with one object per row")
    for place, row in pairs:
        _refuse_media(place, row)
    return pairs


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


def _json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


# Float types with shorter decimal forms than the Python floats made from them, and their `struct` formats.
_FEW_BITS: Final = {"float": "f", "halffloat": "e"}
_MOST_DIGITS: Final = 9
_JSON: Final = "extension<arrow.json>"


def _parquet_rows(file: Path, most: int | None = None) -> list[Mapping[str, Any]]:
    """Return the rows of a Parquet file, or its first rows, at most `most`.

    At any depth, floats of 16 and 32 bits have their shortest form, 0.1 and not 0.10000000149, maps are mappings, and
    JSON, as the type `Json` of HuggingFace's datasets is stored, is parsed.

    Raises:
        ConfigError: the file is not Parquet, exceeds its memory budget, or has a text that is not UTF-8, a time that
            Python's types cannot hold, or JSON that is none; or pyarrow is missing.
        OSError: the file cannot be read.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"reading `{file}` needs the package pyarrow", help="pip install pyarrow, or give the rows as .jsonl lines"
        ) from None
    # Reading a pipe could block forever.
    check_regular(file)
    try:
        take_parquet(parquet, file, Budget.of_files(file), VALUE_BYTES, most=most)
        if most is None:
            table = parquet.read_table(file)
        else:
            with parquet.ParquetFile(file) as opened:
                table = next(opened.iter_batches(batch_size=most), None)
    except OverBudgetError as error:
        raise ConfigError(f"`{file}` {error}", help="split it, or write each text where it belongs") from None
    except Exception as error:  # noqa: BLE001  pyarrow has no common base of its errors
        raise ConfigError(f"`{file}` is not a Parquet file", why=str(error).splitlines()[0]) from None
    return [] if table is None else _table_rows(table, file)


def _table_rows(table: Any, file: Path) -> list[Mapping[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for name, kind, column in zip(table.schema.names, table.schema.types, table.columns, strict=True):
        differs = _differs(kind)
        try:
            values = column.to_pylist()
            columns[name] = [_plain_value(value, kind) for value in values] if differs else values
        except (ValueError, OverflowError) as error:  # a text, a time or JSON
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise ConfigError(
                f"{file}, row {_bad_row(column, kind)}: the value under `{name}` cannot be read",
                why=why,
                help="correct the row, or remove it or the column; times have microseconds at most, and years to 9999",
            ) from None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _bad_row(column: Any, kind: Any) -> int:
    """Return the first row whose value cannot be read."""
    for number in range(len(column)):
        try:
            _plain_value(column[number].as_py(), kind)
        except (ValueError, OverflowError):
            return number
    return 0


def _types_within(kind: Any) -> list[Any]:
    """Return the types within a type."""
    return [kind.field(number).type for number in range(kind.num_fields)]


def _differs(kind: Any) -> bool:
    """Return whether values of a type need `_plain_value`."""
    return str(kind) in (*_FEW_BITS, _JSON) or str(kind).startswith("map<") or any(map(_differs, _types_within(kind)))


def _plain_value(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if str(kind) == _JSON:
        return load_json(value, number=WrittenFloat)
    form = _FEW_BITS.get(str(kind))
    if form is not None:
        return _shortest(value, form) if math.isfinite(value) else value
    if str(kind).startswith("map<"):
        return {key: _plain_value(item, kind.item_type) for key, item in cast("list[tuple[Any, Any]]", value)}
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _plain_value(item, kind.field(name).type) for name, item in fields.items()}
    if isinstance(value, list):
        return [_plain_value(item, kind.value_type) for item in cast("list[Any]", value)]
    return value


def _shortest(number: float, form: str) -> float:
    """Return the float with the fewest digits that equals `number` in a narrower type, a `struct` format."""
    texts = (float(f"{number:.{digits}g}") for digits in range(1, _MOST_DIGITS))
    return next((short for short in texts if struct.unpack(form, _packed(form, short))[0] == number), number)


def _packed(form: str, number: float) -> bytes:
    try:
        return struct.pack(form, number)
    except OverflowError:  # rounded up, beyond the largest
        return struct.pack(form, 0.0)


def _refuse_media(place: str, row: Mapping[str, Any]) -> None:
    """Refuse a row with images, videos or audio.

    Args:
        place: the place of the row, such as `FILE:12`.
        row: the row, whose messages are checked, too.

    Raises:
        ConfigError: the row or one of its messages has media.
    """
    for part in _parts(row):
        for column in _COLUMNS:
            if column in part and _is_media(part[column], part):
                raise ConfigError(
                    f"{place}: there are media in `{column}`, and models of text alone are trained",
                    help=f"remove the row, or `{column}` where the text is complete without it",
                )


def _parts(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a row, and each message in it."""
    yield row
    for value in row.values():
        if isinstance(value, list):
            for item in cast("list[object]", value):
                if isinstance(item, Mapping) and "role" in item:
                    yield cast("Mapping[str, Any]", item)


def _is_media(value: object, part: Mapping[str, Any]) -> bool:
    """Return whether a column holds media; a text, such as a file name, counts only if the row has a placeholder."""
    if isinstance(value, list):
        return any(item is not None for item in cast("list[object]", value))
    if isinstance(value, Mapping):
        return any(cast("Mapping[str, Any]", value).get(name) is not None for name in ("bytes", "path", "url"))
    if isinstance(value, str):
        return any(mark in text for text in _texts(part) for mark in _MARKS)
    return isinstance(value, bytes)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, object]", value).values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _texts(item)
