"""Files of tables in a LeRobotDataset: Parquet, and lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.demonstrations.lerobot.set_files import WHOLE
from recipes.training.reading.parquet_claims import take_parquet
from rlinf_core.foreign.budget import VALUE, Budget, OverBudgetError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import BadJsonError, load_json, wide_encoding


def entry_of(row: Mapping[str, Any], name: str, file: Path) -> Any:
    """Return the entry `name` of a row of `file`.

    Raises:
        DatasetError: the row has none.
    """
    if row.get(name) is None:
        raise DatasetError(f"an entry has no `{name}`", where=str(file), help=WHOLE)
    return row[name]


def read_json_lines(file: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a file of JSON lines.

    Raises:
        DatasetError: it is missing, or a line is not an object.
    """
    rows: list[Mapping[str, Any]] = []
    try:
        content = read_bounded(file, 1 << 32)
        if (other := wide_encoding(content)) is not None:
            raise BadJsonError(f"the file is {other} text, not UTF-8")
        for number, line in enumerate(content.decode("utf-8-sig").splitlines(), 1):
            row: object = load_json(line, non_finite=True) if line.strip() else {}
            if not isinstance(row, dict):
                raise DatasetError("a line is not a JSON object", where=f"{file}:{number}", help=WHOLE)
            if row:
                rows.append(cast("Mapping[str, Any]", row))
    except FileNotFoundError as error:
        raise DatasetError("a file of the data set is missing", where=str(file), help=WHOLE) from error
    except OSError as error:
        raise DatasetError("a file cannot be read", where=str(file), why=error.strerror, help=WHOLE) from error
    except ValueError as error:
        raise DatasetError("a file cannot be read as JSON lines", where=str(file), why=str(error)) from error
    return rows


def read_schema(file: Path) -> Any:
    """Return the schema of a Parquet file.

    Raises:
        DatasetError: it is missing or damaged.
    """
    return _arrow(file, lambda parquet: parquet.read_schema(str(file)))


def read_parquet(file: Path, columns: list[str] | None = None, budget: Budget | None = None, value: int = VALUE) -> Any:
    """Return a Parquet file, or some of its columns, as an Arrow table.

    Args:
        file: the file.
        columns: the columns; None: all.
        budget: the budget of all files of the table; None: the file is all of it.
        value: the bytes that a value takes, besides those of a text.

    Raises:
        DatasetError: it is missing or damaged, or claims more than the budget.
    """

    def read(parquet: Any) -> Any:
        take_parquet(parquet, file, budget or Budget.of_files(file), value, columns=columns)
        return parquet.read_table(str(file), columns=columns, partitioning=None)

    return _arrow(file, read)


def _arrow(file: Path, read: Callable[[Any], Any]) -> Any:
    parquet = needed("pyarrow.parquet", "a LeRobotDataset")
    if not file.is_file():
        raise DatasetError("a file of the data set is missing", where=str(file), help=WHOLE)
    try:
        return read(parquet)
    except OverBudgetError as error:
        raise DatasetError(f"a file of the data set {error}", where=str(file), help=WHOLE) from error
    except Exception as error:  # pyarrow has no common base of its errors
        raise DatasetError(
            "a file of the data set cannot be read",
            where=str(file),
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            help=WHOLE,
        ) from error
