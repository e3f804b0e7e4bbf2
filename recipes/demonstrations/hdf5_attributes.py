"""Attributes of HDF5 files, which their writers store as numbers, as texts, or as JSON."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from recipes.demonstrations.data_errors import DatasetError
from recipes.training.arrays import Array
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
        """Return `control_freq` of robosuite in `env_args`, rows in a second; None: nothing is said.

        Raises:
            DatasetError: it is no rate.
        """
        value = _object(self.content("env_args").get("env_kwargs")).get("control_freq")
        if value is None:
            return None
        number = _number(value)
        if number is None or not 0 < number < math.inf:
            raise self._wrong("env_args.env_kwargs.control_freq", value, "a number of rows in a second")
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
