"""The memory that the values of a Parquet file will take, computed before they are decoded.

A column may store a text once and refer to it in any number of rows, and repeat a number without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rlinf_core.foreign.budget import Budget

_BATCH: Final = 1024
# Texts in this encoding are whole only once decoded; at most this many bytes are decoded at a time.
_PREFIXED: Final = "DELTA_BYTE_ARRAY"
_DECODED: Final = 16 << 20
_TEXT, _FIXED = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"


def take_parquet(
    parquet: Any,
    file: Path,
    budget: Budget,
    value: int,
    *,
    columns: Sequence[str] | None = None,
    most: int | None = None,
) -> None:
    """Draw the memory of a Parquet file's values from a budget.

    Args:
        parquet: the module `pyarrow.parquet`.
        file: the file.
        budget: the budget of the file, or of several.
        value: the bytes of a value, without those of its text.
        columns: the columns that are read; None: all.
        most: the number of first rows whose texts are read; None: all.

    Raises:
        OverBudgetError: the budget is too small.
    """
    metadata = parquet.read_metadata(file)
    texts: dict[str, bool] = {}
    longest = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for number in range(metadata.num_columns):
            column = group.column(number)
            name = column.path_in_schema
            if columns is not None and name.partition(".")[0] not in columns:
                continue
            width = metadata.schema.column(number).length if column.physical_type == _FIXED else 0
            budget.take(column.num_values * (value + max(0, width)), f"`{name}`")
            if column.physical_type == _TEXT:
                texts[name] = texts.get(name, False) or _PREFIXED in column.encodings
                longest = max(longest, column.total_uncompressed_size)
    for names, prefixed in (([name for name in texts if texts[name] is kind], kind) for kind in (False, True)):
        if names:
            # A dictionary stores each distinct text once.
            with parquet.ParquetFile(file, read_dictionary=[] if prefixed else names) as opened:
                size = max(1, min(_BATCH, _DECODED // longest)) if prefixed else _BATCH
                _take_texts(opened.iter_batches(min(size, most or size), columns=names), budget, most)


def _take_texts(batches: Any, budget: Budget, most: int | None) -> None:
    row = 0
    for batch in batches:
        size = sum(map(_text_bytes, batch.columns))
        if size > budget.left:
            for offset in range(len(batch)):
                at = f"row {row + offset}"
                budget.take(sum(_text_bytes(column.slice(offset, 1)) for column in batch.columns), at)
        budget.take(size)
        row += len(batch)
        if most is not None and row >= most:
            return


def _text_bytes(array: Any) -> int:
    """Return the bytes of all texts in an Arrow array, at any depth."""
    compute: Any = import_module("pyarrow.compute")
    array = getattr(array, "storage", array)  # of an extension type
    kind = str(array.type)
    if kind.startswith("dictionary<"):
        return compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if kind.startswith("map<"):
        begin, end = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        return sum(_text_bytes(part.slice(begin, end - begin)) for part in (array.keys, array.items))
    if kind.startswith("struct<"):
        return sum(map(_text_bytes, array.flatten()))
    if hasattr(array, "flatten"):  # lists
        return _text_bytes(array.flatten())
    return compute.sum(compute.binary_length(array)).as_py() or 0
