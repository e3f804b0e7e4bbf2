"""The peers of an operation: one worker by its group and rank, the members of a broadcast by their groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import InvalidNameError

# A group by name, or one or some of its ranks.
Members = str | tuple[str, int | Sequence[int]]


def peer_address(group_name: str, rank: int) -> WorkerAddress:
    """Return the address of one worker.

    Raises:
        InvalidNameError: the name or the rank is not well formed.
    """
    return WorkerAddress.from_name(group_name).get_child_address(rank)


def source_address(
    src: tuple[str, int] | WorkerAddress | None, members: Sequence[tuple[str, Sequence[int] | None]] = ()
) -> WorkerAddress:
    """Return the address of a broadcast's sender; without `src` the first of the members.

    Raises:
        InvalidNameError: `src` is neither a pair nor an address, or there is no first member.
    """
    if isinstance(src, WorkerAddress):
        return src
    if src is None and members:
        name, ranks = members[0]
        if ranks is None or len(ranks) > 0:
            return peer_address(name, 0 if ranks is None else ranks[0])
    pair = cast("object", src)
    if not isinstance(pair, tuple | list) or len(cast("Sequence[object]", pair)) != 2:
        raise InvalidNameError(
            f"{src!r} is not a valid source of a broadcast",
            where="broadcast, `src`",
            why="the source is one worker, given as group name and rank",
            help='write `("actor", 0)`, or pass its `worker_address`',
        )
    return peer_address(*cast("tuple[str, int]", pair))


def broadcast_members(groups: Sequence[Members]) -> list[tuple[str, Sequence[int] | None]]:
    """Return the members of a broadcast: each group's name, with its ranks or None for all.

    Raises:
        InvalidNameError: `groups` is not a sequence of names and of pairs of a name and a rank or ranks.
    """
    members = cast("object", groups)
    if isinstance(members, str | bytes | WorkerAddress) or not isinstance(members, Iterable):
        raise _not_members(members, f"write `[{str(members)!r}]`" if isinstance(members, str | WorkerAddress) else None)
    return [_member(member) for member in cast("Iterable[object]", members)]


def _member(member: object) -> tuple[str, Sequence[int] | None]:
    if isinstance(member, str):
        return member, None
    parts = cast("Sequence[object]", member if isinstance(member, tuple | list) else ())
    if len(parts) != 2 or not isinstance(parts[0], str):
        raise _not_members(cast("object", member), None)
    name, ranks = parts[0], parts[1]
    if isinstance(ranks, int):
        return name, (ranks,)
    if not isinstance(ranks, Iterable) or isinstance(ranks, str | bytes):
        raise _not_members(parts, f"write `({name!r}, [{ranks!r}])`")
    listed = cast("Iterable[int]", ranks)
    return name, listed if isinstance(listed, Sequence) else tuple(listed)


def _not_members(groups: object, help: str | None) -> InvalidNameError:
    return InvalidNameError(
        f"{groups!r} does not name the members of a broadcast",
        where="broadcast, `groups`",
        why="it takes a list of groups: names, or pairs of a name and its rank or ranks",
        help=help or 'write `["rollout"]`, or `[("rollout", [0, 1])]`',
    )
