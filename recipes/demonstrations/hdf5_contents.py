"""Checks that an untrusted HDF5 file holds its own data: HDF5 links may lead to other files, or form cycles."""

from __future__ import annotations

import math
from typing import Any, Final, cast

import numpy as np

from recipes.demonstrations.columns import DatasetError
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.strict_json import BadJsonError, load_json


class Attributes:
    """The attributes of a group.

    A missing attribute, an empty one, and JSON's `null` all count as absent.

    Args:
        attributes: the attributes object of h5py.
        where: the file and the group, for errors.
    """

    def __init__(self, attributes: Any, where: str) -> None:
        self._attributes, self._where = attributes, where

    def value(self, name: str) -> Any:
        """Return an attribute as a text, a number, a boolean or an array of these; None if it is absent."""
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
        """Return an attribute that is a JSON object, without its `null` entries; empty if it is absent."""
        value = self.value(name)
        try:
            return _object(load_json(value, non_finite=True) if isinstance(value, str) else None)
        except BadJsonError:
            return {}

    def count(self, name: str) -> int | None:
        """Return an attribute that is a whole number; None if it is absent.

        Raises:
            DatasetError: the attribute is not a whole number.
        """
        value = self.value(name)
        number = None if value is None else _number(value)
        if number is not None and not (number.is_integer() and number >= 0):
            number = None
        if number is None and value is not None:
            raise self._wrong(name, value, "a whole number")
        return None if number is None else int(number)

    def rate(self) -> float | None:
        """Return robosuite's `control_freq` in `env_args`, rows per second; None if it is absent.

        Raises:
            DatasetError: the value is not a valid rate.
        """
        value = _object(self.content("env_args").get("env_kwargs")).get("control_freq")
        if value is None:
            return None
        number = _number(value)
        if number is None or not 0 < number < math.inf:
            raise self._wrong("env_args.env_kwargs.control_freq", value, "a number of rows per second")
        return int(number) if number.is_integer() else number

    def solved(self) -> bool | None:
        """Return Isaac Lab's `success`; None if it is absent.

        Raises:
            DatasetError: the value is neither true nor false.
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
        """Return LIBERO's instruction, or the name of robomimic's environment; None if both are absent.

        Raises:
            DatasetError: the value is neither a text nor a list of texts.
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
    """Return a number, also from its text; None if the value is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# The deepest nesting of groups; the known layouts have four levels.
_DEEPEST: Final = 16
# Lower bounds of the bytes that a path takes while it is checked, and that a number takes once it is read.
_PATH: Final = 16 << 10
_NUMBER: Final = 4


def check_contents(group: Any, where: str, budget: Budget, above: str = "", depth: int = 0) -> None:
    """Check the links of an h5py group, recursively.

    Raises:
        DatasetError: a link leads to another file or to nothing, or a group contains itself.
        OverBudgetError: there are more paths than the file could hold, since a group may have several names.
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
    """Check that an h5py data set holds rows of numbers.

    Raises:
        DatasetError: it holds values of another type, or a single value or none.
    """
    if column.dtype.kind not in "fiub" or not column.shape:
        what = f"values of the type `{column.dtype}`, not numbers" if column.dtype.kind not in "fiub" else "no rows"
        message = f"`{column.name.strip('/')}` holds {what}"
        raise DatasetError(message, where=where, help="convert the file again")


def take_column(column: Any, where: str, budget: Budget, *, rows: int | None = None) -> Any:
    """Return an h5py data set once the bytes of `rows` of its rows (None: all) are drawn from the budget.

    Raises:
        DatasetError: some rows were never written; HDF5 would read them as zeros.
        OverBudgetError: the budget does not cover the rows, or one compressed block.
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
    """Refuse a data set whose values are in other files: HDF5's external storage, or a virtual data set."""
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
