"""Messages between workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, overload

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.work import Work
from rlinf_core.errors import InvalidNameError, RuntimeFailure
from rlinf_core.suggest import as_index
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.worker.calls import check_call

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensor = torch.Tensor | np.ndarray[Any, Any]


class Communication:
    """The communication methods of a worker.

    A peer is named by its group and its rank there. A group that a worker launched is named by that worker's address,
    such as `env:0`. All operations of a pair in one direction match in the order of issue.

    Every operation takes a `timeout` in seconds, by default `RLINF_TIMEOUT`, and raises

    * `CommunicationTimeoutError` when the timeout passes, with a description of the waits,
    * `DeadlockError` as soon as no process can ever wake it,
    * `WorkerDiedError` when the peer's process is gone,
    * `UnknownGroupError` or `PeerNotFoundError` when there is no such peer,
    * `MismatchError` when the operations of the two sides do not fit each other,
    * `PayloadError` when an object cannot be sent.

    With `async_op=True` it returns at once a handle with `wait()`, `async_wait()`, `done()` and `then(function)`; a
    sent object must not change before the handle's `wait`.
    """

    config_section: ClassVar[str | None] = None
    """The section of the configuration for this class, for example `actor`. If the constructor's arguments hold the
    configuration, the group takes its name from `group_name` of that section, unless `launch` names it."""

    forked: ClassVar[bool] = False
    """Whether the group's processes on one node are forked from a process that has imported the class's module, and
    share its memory. It suits groups of many workers. The module and its imports must start no thread, as torch may;
    NumPy computes with one thread. A forked process joins Ray when it first launches or calls a group."""

    _rlinf_groups: dict[tuple[WorkerAddress, ...], CollectiveGroup] | None = None

    @property
    def worker_address(self) -> WorkerAddress:
        """This worker's name among all workers of the job."""
        raise NotImplementedError

    @classmethod
    def _rlinf_methods(cls) -> frozenset[str]:
        """Return the names of the methods that a group of this class has."""
        raise NotImplementedError

    # Objects

    @overload
    def send(
        self,
        object: object,
        dst_group_name: str,
        dst_rank: int,
        async_op: Literal[False] = False,
        *,
        timeout: float | None = None,
        piggyback_payload: object = None,
    ) -> None: ...
    @overload
    def send(
        self,
        object: object,
        dst_group_name: str,
        dst_rank: int,
        async_op: Literal[True],
        *,
        timeout: float | None = None,
        piggyback_payload: object = None,
    ) -> Work[None]: ...
    @overload
    def send(
        self,
        object: object,
        dst_group_name: str,
        dst_rank: int,
        async_op: bool,
        *,
        timeout: float | None = None,
        piggyback_payload: object = None,
    ) -> Work[None] | None: ...
    def send(
        self,
        object: object,
        dst_group_name: str,
        dst_rank: int,
        async_op: bool = False,
        *,
        timeout: float | None = None,
        piggyback_payload: object = None,
    ) -> Work[None] | None:
        """Send any picklable object; pickle does not copy the tensors and arrays in it, at any depth.

        Returns when the object may be modified, without waiting for the peer to receive it. Tensors arrive detached,
        and views of one tensor as tensors of their own.

        A `piggyback_payload` other than None travels in the same message: the peer's `recv` returns the pair
        `(object, piggyback_payload)`.
        """
        peer = peer_address(dst_group_name, dst_rank)
        if piggyback_payload is not None:
            object = (object, piggyback_payload)
        return self._rlinf_pair(peer).send(object, peer, async_op=async_op, timeout=timeout)

    @overload
    def recv(
        self, src_group_name: str, src_rank: int, async_op: Literal[True], *, timeout: float | None = None
    ) -> Work[Any]: ...
    @overload
    def recv(
        self, src_group_name: str, src_rank: int, async_op: bool = False, *, timeout: float | None = None
    ) -> Any: ...
    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False, *, timeout: float | None = None) -> Any:
        """Return the next object that the peer sends here; a pair if it was sent with a `piggyback_payload`."""
        peer = peer_address(src_group_name, src_rank)
        return self._rlinf_pair(peer).recv(peer, async_op=async_op, timeout=timeout)

    # One tensor

    def send_tensor(
        self,
        tensor: Tensor,
        dst_group_name: str,
        dst_rank: int,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Work[None] | None:
        """Send one tensor to a `recv_tensor` with a buffer of its size and dtype, without metadata.

        A mismatch is an error on both sides: here the handle raises it, or else the method during which it was
        reported, at its end. Later operations are not affected.
        """
        peer = peer_address(dst_group_name, dst_rank)
        return self._rlinf_pair(peer).send_tensor(tensor, peer, async_op=async_op, timeout=timeout)

    def recv_tensor(
        self,
        tensor: Tensor,
        src_group_name: str,
        src_rank: int,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Fill `tensor` in place with the next tensor that the peer sends here, and return it."""
        peer = peer_address(src_group_name, src_rank)
        return self._rlinf_pair(peer).recv_tensor(tensor, peer, async_op=async_op, timeout=timeout)

    # Many

    def send_to(self, objects: Mapping[int, object], dst_group_name: str, *, timeout: float | None = None) -> None:
        """Send to several workers of a group, to each its own object: `{rank: object}`.

        Returns when the objects may be modified. They are sent concurrently; each worker receives its own with `recv`.
        """
        sent: list[Work[None]] = []
        try:
            for rank, obj in objects.items():
                sent.append(self.send(obj, dst_group_name, rank, True, timeout=timeout))
        finally:
            # After a failure, too, the caller may modify the objects.
            for work in sent:
                work.wait_until(work.deadline)
        for work in sent:
            work.wait()

    def recv_from(
        self, src_group_name: str, src_ranks: Iterable[int], *, timeout: float | None = None
    ) -> dict[int, Any]:
        """Return the next object from each of several workers of a group, by rank in the order of `src_ranks`.

        If one receive fails, the others are cancelled, and objects that have arrived are dropped.
        """
        received: dict[int, Work[Any]] = {}
        try:
            for rank in dict.fromkeys(src_ranks):
                received[rank] = self.recv(src_group_name, rank, True, timeout=timeout)
            return {rank: work.wait() for rank, work in received.items()}
        except BaseException as error:
            # A receive that is left behind would take a message from a later one.
            for work in received.values():
                work.fail(error)
            raise

    def broadcast(
        self,
        object: object,
        groups: Sequence[Members],
        src: tuple[str, int] | WorkerAddress | None = None,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send the object of `src` to every member, and return it.

        Every member calls it, with the same groups and source.

        Args:
            object: the object that `src` sends; ignored in other members.
            groups: the members, for example `["rollout"]`: names of groups, or pairs of a name and its rank or ranks.
                `src` may be among them.
            src: the group name and rank, or the address, of the sender; by default the first rank of the first of
                `groups`.
            async_op: whether to return a handle at once.
            timeout: seconds.

        Raises:
            InvalidNameError: `groups` or `src` has another form.
        """
        named = broadcast_members(groups)
        source = source_address(src, named)
        members: list[WorkerAddress] = []
        if source == self.worker_address:
            for name, ranks in named:
                taking = range(self._rlinf_group_size(name)) if ranks is None else ranks
                members.extend(peer_address(name, rank) for rank in taking)
        pair = self._rlinf_group((source, *members))
        return pair.broadcast(object, source, async_op=async_op, timeout=timeout)

    # Helpers, with names that subclasses do not use by accident

    def _rlinf_pair(self, peer: WorkerAddress) -> CollectiveGroup:
        check_call()
        return self._rlinf_group((peer,))

    def _rlinf_group(self, members: tuple[WorkerAddress, ...]) -> CollectiveGroup:
        groups = self._rlinf_groups
        if groups is None:
            groups = self._rlinf_groups = {}
        group = groups.get(members)
        if group is None:
            client = self._rlinf_client
            group = groups[members] = CollectiveGroup(client.endpoint, self.worker_address, members, client)
        return group

    def _rlinf_group_size(self, name: str) -> int:
        client = self._rlinf_client
        return client.group_size(name, client.endpoint.settings.connect_timeout)

    @property
    def _rlinf_client(self) -> ManagerClient:
        client = current_client()
        if client is None:
            raise RuntimeFailure("this process is not connected to a job", help="only launched workers communicate")
        return client


# A group by name, or a pair of the name and one or several of its ranks.
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
    """Return the address of a broadcast's sender; without `src`, that of the first member.

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
    rank = as_index(ranks)
    if rank is not None:
        return name, (rank,)
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
