"""Checks that a received HDF5 file holds what it names: HDF5 can refer to other files, and to itself in a circle."""

from __future__ import annotations

from typing import Any, Final

from recipes.demonstrations.data_errors import DatasetError

# Groups within groups; those of the known layouts are four.
_DEEPEST: Final = 16


def check_contents(group: Any, where: str, above: str = "", depth: int = 0) -> None:
    """Check the links of a group of h5py, and of the groups within.

    Raises:
        DatasetError: something lies in another file, does not exist, or a group contains itself.
    """
    for name in group:
        path = f"{above}{name}"
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
            check_contents(item, where, f"{path}/", depth + 1)


def check_numbers(column: Any, where: str) -> None:
    """Check that a data set of h5py holds numbers.

    Raises:
        DatasetError: it holds texts or other things.
    """
    if column.dtype.kind not in "fiub":
        message = f"`{column.name.strip('/')}` holds values of the type `{column.dtype}`, not numbers"
        raise DatasetError(message, where=where, help="convert the file again")


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
