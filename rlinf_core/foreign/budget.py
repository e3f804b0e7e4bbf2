"""Budgets of bytes: the sizes that a file or a message claims are added up and checked before memory is allocated.

A few bytes can claim gigabytes: a shape, a count, compressed text, text to which thousands of rows refer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

KIB, MIB, GIB, TIB = (1 << 10 * power for power in range(1, 5))
# Real data compresses to a tenth, seldom to a thirtieth.
_TIMES: Final = 128
_LEAST: Final = 128 * MIB
# Bytes of a value as a Python object, besides its text.
VALUE_BYTES: Final = 64


class OverBudgetError(ValueError):
    """A claim beyond a budget; the message is a sentence without its subject."""


class Budget:
    """The bytes that may be allocated for one file or message.

    Args:
        most: the maximum number of bytes.
        of: the owner, as in `a file of 5 KiB`.

    Attributes:
        left: the remaining bytes.
    """

    def __init__(self, most: int, of: str) -> None:
        self._most = self.left = most
        self.of = of

    @classmethod
    def of_size(cls, size: int, what: str = "a file") -> Budget:
        """Return the budget of `size` received bytes: 128 times as much, and at least 128 MiB."""
        return cls(max(_LEAST, _TIMES * size), f"{what} of {in_words(size)}")

    @classmethod
    def of_files(cls, *files: str | os.PathLike[str]) -> Budget:
        """Return the common budget of files; see `of_size`.

        Raises:
            OSError: a file does not exist.
        """
        what = "a file" if len(files) == 1 else f"{len(files)} files"
        return cls.of_size(sum(os.stat(file).st_size for file in files), what)

    def take(self, size: int, up_to: str = "") -> None:
        """Take bytes from the budget.

        Args:
            size: the number of bytes.
            up_to: the place in the file that needs them, as in `row 12`.

        Raises:
            OverBudgetError: fewer bytes are left.
        """
        self.left -= size
        if self.left < 0:
            claimed = in_words(self._most - self.left)
            place = f" up to {up_to}" if up_to else ""
            raise OverBudgetError(f"claims {claimed}{place}; {self.of} may take {in_words(self._most)}")

    def take_array(self, shape: Iterable[int], itemsize: int, up_to: str = "") -> None:
        """Take the bytes of an array; see `take`."""
        size = itemsize
        for length in shape:
            size *= max(0, length)
        self.take(size, up_to)


def json_size(text: str | bytes) -> int:
    """Return an approximate upper bound of the bytes that the value of a JSON text takes."""
    marks = (",", ":", "[", "{") if isinstance(text, str) else (b",", b":", b"[", b"{")
    return len(text) + VALUE_BYTES * sum(text.count(mark) for mark in marks)  # pyright: ignore[reportArgumentType]


def in_words(size: int) -> str:
    """Return a number of bytes in words, as in `1.5 MiB`."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "bytes"))
    return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"


_UNITS: Final = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
