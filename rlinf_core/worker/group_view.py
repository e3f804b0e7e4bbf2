"""Calls on some ranks of a group."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.config.ranks import format_ranks
from rlinf_core.errors import RLinfError
from rlinf_core.suggest import short_repr
from rlinf_core.worker.calls import GroupMember, unanswered, unpicklable, whole
from rlinf_core.worker.handle import WorkerGroupHandle


@contextmanager
def pickling(what: str) -> Generator[None, None, None]:
    """Raise a `PayloadError` about `what` for an error in the block, except for errors of the cluster."""
    try:
        yield
    except (RLinfError, ray_api().exceptions.RayError):
        raise
    except Exception as error:  # noqa: BLE001 - pickling runs code of arbitrary types, which can raise anything
        raise unpicklable(what, error) from None


class CalledGroup(Protocol):
    """The interface of a group to its views, which `WorkerGroup` implements."""

    @property
    def worker_group_name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def methods(self) -> frozenset[str]: ...
    def check_method(self, name: str, /) -> None: ...


class GroupMethod:
    """A method of the user's class, called on some ranks of a group in parallel."""

    def __init__(self, view: GroupView, name: str) -> None:
        self._view = view
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._view.group.worker_group_name}.{self._name} of {len(self._view.members)} workers>"

    def __call__(self, *args: Any, **kwargs: Any) -> WorkerGroupHandle[Any]:
        """Call the method on every rank with the same arguments.

        Raises:
            PayloadError: an argument does not pickle. No rank was called.
        """
        args, kwargs = tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}
        with pickling(f"an argument of `{self._name}`"):
            # The task's name, which Ray sends anyway, carries the method.
            references = [
                member.actor.call.options(name=self._name).remote(*args, **kwargs) for member in self._view.members
            ]
        return self._view.handle(self._name, references)

    def scatter(self, *per_rank: Sequence[Any], **per_rank_named: Sequence[Any]) -> WorkerGroupHandle[Any]:
        """Call the method with a different share on each rank: every argument is a sequence with one item per rank.

        Raises:
            ValueError: an argument is not a sequence, or its length is not the number of ranks.
            PayloadError: a share does not pickle. Calls already sent are cancelled.
        """
        members = self._view.members
        for share in (*per_rank, *per_rank_named.values()):
            items = _items(share)
            if items is None:
                raise ValueError(
                    f"{short_repr(share)} is not a sequence for {len(members)} workers: pass one item for each"
                )
            if items != len(members):
                raise ValueError(f"{items} items for {len(members)} workers: pass one for each")
        # Taken before the first call: a sequence of the user's class may raise.
        shares = [
            (
                [whole(share[rank]) for share in per_rank],
                {name: whole(share[rank]) for name, share in per_rank_named.items()},
            )
            for rank in range(len(members))
        ]
        references: list[Any] = []
        for rank, (member, (args, named)) in enumerate(zip(members, shares, strict=True)):
            try:
                with pickling(f"a share of `{self._name}`"):
                    references.append(member.actor.call.options(name=self._name).remote(*args, **named))
            except Exception:
                GroupView(self._view.group, members[:rank]).handle(self._name, references).cancel()
                raise
        return self._view.handle(self._name, references)


class GroupView:
    """A view of some ranks of a group, callable like the group; `group.execute_on(0, 3)` returns one."""

    def __init__(self, group: CalledGroup, members: Sequence[GroupMember]) -> None:
        self.group = group
        self.members = tuple(members)

    def __repr__(self) -> str:
        ranks = format_ranks([member.address.ranks[-1] for member in self.members])
        return f"<rank{'s' if len(self.members) > 1 else ''} {ranks} of {self.group.worker_group_name}>"

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            # Before there is a group: a copy is asked for special methods.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.group.check_method(name)
        return GroupMethod(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.group.methods})

    def handle(self, method: str, references: list[Any]) -> WorkerGroupHandle[Any]:
        """Return the handle of a call that has been made on these ranks."""
        made = WorkerGroupHandle[Any](
            self.group.worker_group_name, method, self.group.world_size, self.members, references
        )
        unanswered.add(made)
        return made


def _items(share: Any) -> int | None:
    """Return the length of a sequence argument; None if it is not a sequence."""
    if isinstance(share, Mapping) or not hasattr(share, "__getitem__"):
        return None
    try:
        return len(share)
    except TypeError:  # for example an array without dimensions
        return None
