"""Checks that a received HDF5 file holds what it names: HDF5 can refer to other files, and to itself in a circle."""

from __future__ import annotations

import math
from typing import Any, Final, cast

import numpy as np

from recipes.demonstrations.data_errors import DatasetError
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.strict_json import BadJsonError, load_json


class Attributes:
    """The attributes of a group.

    An attribute that is missing, an empty one, and JSON's `null` all say nothing.

    Args:
        attributes: those of h5py.
        where: the file and the group, for errors.
    """

    def __init__(self, attributes: Any, where: str) -> None:
        self._attributes, self._where = attributes, where

    def value(self, name: str) -> Any:
        """Return an attribute as a text, a number, a truth value or an array of several; None: it says nothing."""
        value: Any = self._attributes.get(name)
        if value is None or getattr(value, "shape", ()) is None:  # `h5py.Empty`
            return None
        array: Array = np.asarray(value)
        if array.size > 1:
            return array
        single: object = array.reshape(-1).tolist()[0] if array.size else None
        if isinstance(single, bytes):
            single = single.decode("utf-8", "replace")
        return None if isinstance(single, str) and single.strip().strip("\0") in ("", "null") else single

    def content(self, name: str) -> dict[str, Any]:
        """Return an attribute that is an object of JSON, without entries that are `null`; empty: it says nothing."""
        value = self.value(name)
        try:
            return _object(load_json(value, non_finite=True) if isinstance(value, str) else None)
        except BadJsonError:
            return {}

    def count(self, name: str) -> int | None:
        """Return an attribute that is a whole number; None: it says nothing.

        Raises:
            DatasetError: it is something else.
        """
        value = self.value(name)
        number = None if value is None else _number(value)
        if number is not None and not (number.is_integer() and number >= 0):
            number = None
        if number is None and value is not None:
            raise self._wrong(name, value, "a whole number")
        return None if number is None else int(number)

    def rate(self) -> float | None:
        """Return `control_freq` of robosuite in `env_args`, rows per second; None: nothing is said.

        Raises:
            DatasetError: it is no rate.
        """
        value = _object(self.content("env_args").get("env_kwargs")).get("control_freq")
        if value is None:
            return None
        number = _number(value)
        if number is None or not 0 < number < math.inf:
            raise self._wrong("env_args.env_kwargs.control_freq", value, "a number of rows per second")
        return int(number) if number.is_integer() else number

    def solved(self) -> bool | None:
        """Return Isaac Lab's `success`; None: it says nothing.

        Raises:
            DatasetError: it is neither true nor false.
        """
        value = self.value("success")
        known = {"true": True, "false": False, "1": True, "0": False}
        if value is None:
            return None
        word = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip().lower()
        if word not in known:
            raise self._wrong("success", value, "true or false")
        return known[word]

    def instruction(self) -> str | None:
        """Return the instruction of LIBERO, or the name of robomimic's environment; None: there is neither.

        Raises:
            DatasetError: it is neither a text nor a list of texts.
        """
        for name, key in (("problem_info", "language_instruction"), ("env_args", "env_name")):
            said: Any = self.content(name).get(key)
            parts: list[object] = cast("list[object]", said) if isinstance(said, list) else [said]
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) != sum(part is not None for part in parts):
                raise self._wrong(f"{name}.{key}", self.content(name)[key], "a text")
            if text := " ".join(texts).strip('" '):
                return text
        return None

    def _wrong(self, name: str, value: object, wanted: str) -> DatasetError:
        shown = repr(value)
        return DatasetError(
            f"the attribute `{name}` is {shown if len(shown) < 60 else type(value).__name__}, not {wanted}",
            where=self._where,
            help="correct the attribute, or convert the file again",
        )


def _object(value: object) -> dict[str, Any]:
    entries: dict[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return {name: entry for name, entry in entries.items() if entry is not None}


def _number(value: object) -> float | None:
    """Return a number, or one that a text is; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


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
