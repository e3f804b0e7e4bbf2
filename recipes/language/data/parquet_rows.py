"""Rows of Parquet files as Python values."""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from recipes.language.data.json_rows import WrittenFloat
from recipes.training.parquet_claims import take_parquet
from rlinf_core import ConfigError
from rlinf_core.foreign.budget import VALUE, Budget, OverBudgetError
from rlinf_core.foreign.files import check_regular
from rlinf_core.foreign.strict_json import load_json

# Float types with shorter decimal forms than the Python floats made from them, and their `struct` formats.
_FEW_BITS: Final = {"float": "f", "halffloat": "e"}
_MOST_DIGITS: Final = 9
_JSON: Final = "extension<arrow.json>"


def parquet_rows(file: Path, most: int | None = None) -> list[Mapping[str, Any]]:
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
        take_parquet(parquet, file, Budget.of_files(file), VALUE, most=most)
        if most is None:
            table = parquet.read_table(file)
        else:
            with parquet.ParquetFile(file) as opened:
                table = next(opened.iter_batches(batch_size=most), None)
    except OverBudgetError as error:
        raise ConfigError(f"`{file}` {error}", help="split it, or write each text where it belongs") from None
    except Exception as error:  # noqa: BLE001  pyarrow has no common base of its errors
        raise ConfigError(f"`{file}` is not a Parquet file", why=str(error).splitlines()[0]) from None
    return [] if table is None else _rows(table, file)


def _rows(table: Any, file: Path) -> list[Mapping[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for name, kind, column in zip(table.schema.names, table.schema.types, table.columns, strict=True):
        differs = _differs(kind)
        try:
            values = column.to_pylist()
            columns[name] = [_value(value, kind) for value in values] if differs else values
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
            _value(column[number].as_py(), kind)
        except (ValueError, OverflowError):
            return number
    return 0


def _parts(kind: Any) -> list[Any]:
    """Return the types within a type."""
    return [kind.field(number).type for number in range(kind.num_fields)]


def _differs(kind: Any) -> bool:
    """Return whether values of a type need `_value`."""
    return str(kind) in (*_FEW_BITS, _JSON) or str(kind).startswith("map<") or any(map(_differs, _parts(kind)))


def _value(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if str(kind) == _JSON:
        return load_json(value, number=WrittenFloat)
    form = _FEW_BITS.get(str(kind))
    if form is not None:
        return _shortest(value, form) if math.isfinite(value) else value
    if str(kind).startswith("map<"):
        return {key: _value(item, kind.item_type) for key, item in cast("list[tuple[Any, Any]]", value)}
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _value(item, kind.field(name).type) for name, item in fields.items()}
    if isinstance(value, list):
        return [_value(item, kind.value_type) for item in cast("list[Any]", value)]
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
