"""Checks that a received HDF5 file holds what it names: HDF5 can refer to other files, and to itself in a circle."""

from __future__ import annotations

import math
from typing import Any, Final

from recipes.demonstrations.data_errors import DatasetError
from rlinf_core.foreign.budget import Budget

# Groups within groups; those of the known layouts are four.
_DEEPEST: Final = 16
# Bytes that a path takes while it is looked at, and a number once it is read, at least.
_PATH: Final = 16 << 10
_NUMBER: Final = 4


def check_contents(group: Any, where: str, budget: Budget, above: str = "", depth: int = 0) -> None:
    """Check the links of a group of h5py, and of the groups within.

    Raises:
        DatasetError: something lies in another file, does not exist, or a group contains itself.
        OverBudgetError: there are more paths than the file has room for: a group may have several names.
    """
    for name in group:
        path = f"{above}{name}"
        budget.take(_PATH, f"`{path}`")
        link = group.get(name, getlink=True)
        if hasattr(link, "filename"):
            raise _foreign(path, str(link.filename), where)
        item = group.get(name)
        if item is None:
            raise DatasetError(f"`{path}` refers to `{link.path}`, which does not exist", where=where, help=_REMEDY)
        if not hasattr(item, "keys"):
            _check_stored_here(item, path, where)
        elif depth == _DEEPEST or hasattr(link, "path"):
            message = f"`{path}` is a link to a group" if depth < _DEEPEST else f"groups are nested too deep: `{path}`"
            raise DatasetError(message, where=where, help=_REMEDY)
        else:
            check_contents(item, where, budget, f"{path}/", depth + 1)


def check_numbers(column: Any, where: str) -> None:
    """Check that a data set of h5py holds numbers.

    Raises:
        DatasetError: it holds texts or other things.
    """
    if column.dtype.kind not in "fiub":
        message = f"`{column.name.strip('/')}` holds values of the type `{column.dtype}`, not numbers"
        raise DatasetError(message, where=where, help="convert the file again")


def take_column(column: Any, where: str, budget: Budget, *, rows: int | None = None) -> Any:
    """Return a data set of h5py of which `rows` are to be read, once their bytes are drawn; None: all of them.

    Raises:
        DatasetError: rows of it were never written; HDF5 would read them as zeros.
        OverBudgetError: there is not enough for the rows, or for a block of them that is compressed together.
    """
    name = f"`{column.name.strip('/')}`"
    shape, size = column.shape, max(_NUMBER, column.dtype.itemsize)
    chunks: tuple[int, ...] = column.chunks or ()
    Budget(budget.left, budget.of).take_array(chunks, size, f"a block of {name}")
    budget.take_array(shape if rows is None else (rows, *shape[1:]), size, name)
    if column.size and not getattr(column, "is_virtual", False):
        blocks = math.prod(-(-length // chunk) for length, chunk in zip(shape, chunks, strict=True)) if chunks else 1
        written = column.id.get_num_chunks() if chunks else int(column.id.get_storage_size() > 0)
        if written < blocks:
            message = f"{name} claims {math.prod(shape[:1])} rows, but not all of them were ever written"
            why = f"{written} of {blocks} blocks are in the file"
            raise DatasetError(message, where=where, why=why, help="copy or convert the complete file again")
    return column


_REMEDY: Final = "convert the file again, so that it holds everything itself"


def _check_stored_here(item: Any, path: str, where: str) -> None:
    """Refuse a data set whose numbers are in other files: HDF5's external storage, or a virtual data set."""
    if getattr(item, "external", None):
        raise _foreign(path, str(item.external[0][0]), where)
    for source in item.virtual_sources() if getattr(item, "is_virtual", False) else ():
        if source.file_name != ".":
            raise _foreign(path, str(source.file_name), where)


def _foreign(path: str, file: str, where: str) -> DatasetError:
    return DatasetError(
        f"`{path}` refers to another file, `{file}`",
        where=where,
        why="a data set is read from its own files alone",
        help=_REMEDY,
    )
