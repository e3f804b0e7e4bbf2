"""The address of a worker: its group, and the ranks that lead to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_core.errors import InvalidNameError
from rlinf_core.suggest import as_index, short_repr

_SEPARATOR = ":"


@dataclass(frozen=True, order=True, slots=True, init=False, repr=False)
class WorkerAddress:
    """The name of one worker among all workers of a job: an immutable, ordered, hashable value.

    `WorkerAddress("actor", 0)` is rank 0 of the group `actor`; a worker that this one launches is
    `WorkerAddress("actor", (0, 1))`. Addresses order by group name, then by ranks as numbers. Without ranks an address
    names the group itself, which is not a worker.

    Raises:
        InvalidNameError: the group name is not valid (see `check_name`), or a rank is negative.
    """

    root_group_name: str
    ranks: tuple[int, ...]

    def __init__(self, root_group_name: str, ranks: int | Iterable[int] = ()) -> None:
        check_name(root_group_name)
        path = tuple(map(_checked_rank, ranks if isinstance(ranks, Iterable) else (ranks,)))
        object.__setattr__(self, "root_group_name", root_group_name)
        object.__setattr__(self, "ranks", path)

    @classmethod
    def from_name(cls, name: str) -> WorkerAddress:
        """Parse an address from the form of `get_name`.

        Raises:
            InvalidNameError: `name` is not a group name followed by ranks, as in `actor:0:1`.
        """
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            form = "an address is text" + (", as from `get_name()`" if isinstance(name, WorkerAddress) else "")
            raise InvalidNameError(f"{name!r} is not the name of a group or a worker", help=form)
        group, *parts = name.split(_SEPARATOR)
        for part in parts:
            # Only the form of get_name: no signs, spaces, underscores or leading zeros.
            if not (part.isascii() and part.isdigit()) or (part != "0" and part.startswith("0")):
                raise InvalidNameError(
                    f"`{name}` is not the address of a worker: `{part}` is not a rank",
                    help="an address is a group name and ranks, as in `actor:0` or `actor:0:1`",
                )
        return cls(group, [int(part) for part in parts])

    def get_name(self) -> str:
        """Return the address as text, as in `actor:0:1`."""
        return _SEPARATOR.join((self.root_group_name, *map(str, self.ranks)))

    @property
    def rank(self) -> int:
        """The worker's rank in its own group.

        Raises:
            InvalidNameError: the address names a group, which has no rank.
        """
        if not self.ranks:
            raise InvalidNameError(f"`{self.root_group_name}` is a group, not a worker: it has no rank")
        return self.ranks[-1]

    def get_parent_rank(self) -> int | None:
        """Return the rank of the worker that launched this one, or None if the driver did."""
        return self.ranks[-2] if len(self.ranks) > 1 else None

    def get_parent_address(self) -> WorkerAddress | None:
        """Return the parent of this address: a worker, or the group itself; None for a group."""
        return WorkerAddress(self.root_group_name, self.ranks[:-1]) if self.ranks else None

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Return the address of rank `rank` in a group that this worker launches."""
        return WorkerAddress(self.root_group_name, (*self.ranks, rank))

    def __str__(self) -> str:
        return self.get_name()

    def __repr__(self) -> str:
        return f"WorkerAddress({self.get_name()!r})"

    def __reduce__(self) -> tuple[type[WorkerAddress], tuple[str, tuple[int, ...]]]:
        return WorkerAddress, (self.root_group_name, self.ranks)


def _checked_rank(rank: int) -> int:
    """Return `rank` as an int: with an equal float such as 1.0, equal addresses would have different names."""
    number = as_index(rank)
    if number is None or number < 0:
        raise InvalidNameError(f"{rank!r} is not a rank of a worker", help="ranks are integers >= 0")
    return number


def check_name(name: str, of: str = "group") -> None:
    """Check that `name` is a valid name of a group or of a channel (whose process is a group, too).

    Raises:
        InvalidNameError: it is not text, is empty, or holds an unprintable character or `:`, which separates ranks.
    """
    is_text = isinstance(name, str)  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
    if not is_text or not name or _SEPARATOR in name or not name.isprintable():
        raise InvalidNameError(
            f"{short_repr(name)} is not a valid name of a {of}",
            help="a name is text, is not empty, and contains neither `:` nor unprintable characters",
        )
