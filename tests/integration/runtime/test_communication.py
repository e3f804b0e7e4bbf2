"""Workers that send to each other, on a real local Ray."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import InvalidNameError, MismatchError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.group.worker_group import WorkerGroup
from rlinf_core.worker.worker import Worker


@dataclass
class Batch:
    tokens: Any
    notes: list[str]


class Talker(Worker):
    def exchange(self, group: str) -> dict[int, Any]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self.send_to({rank: (self._rank, rank) for rank in others}, group)
        return self.recv_from(group, reversed(others))

    def with_payload(self, group: str) -> list[Any]:
        if self._rank == 0:
            self.send([1, 2], group, 1, piggyback_payload={"version": 7})
            self.send([3], group, 1, async_op=True, piggyback_payload=0).wait()
            self.send([4], group, 1, piggyback_payload=None)
            return []
        return [self.recv(group, 0) for _ in range(3)]

    def ring(self, group: str) -> str:
        me, size = self._rank, self._world_size
        self.send(f"from {me}", group, (me + 1) % size)
        return self.recv(group, (me - 1) % size)

    def tensors(self, group: str) -> tuple[str, float, list[str]]:
        import torch

        if self._rank == 0:
            self.send(Batch(torch.full((1000, 1000), 3.0), ["a", "b"]), group, 1)
            self.send_tensor(torch.arange(6.0), group, 1)
            return "", 0.0, []
        batch = self.recv(group, 0)
        target = torch.empty(6)
        self.recv_tensor(target, group, 0)
        return type(batch).__name__, float(batch.tokens.sum() + target.sum()), batch.notes

    def mismatch(self, group: str) -> None:
        import torch

        if self._rank == 0:
            self.send_tensor(torch.ones(4), group, 1)
            # It comes after the peer's answer, so that this call knows of the mismatch when it ends.
            self.recv(group, 1)
        else:
            try:
                self.recv_tensor(torch.ones(3), group, 0)
            finally:
                self.send("done", group, 0)

    def late_mismatch(self, group: str) -> str | None:
        """Send what does not fit; the peer finds out when this call may be over."""
        import torch

        if self._rank == 0:
            self.send_tensor(torch.ones(4), group, 1)
            return None
        try:
            self.recv_tensor(torch.ones(3), group, 0)
        except MismatchError as error:
            return type(error).__name__
        return "nothing"

    def objects(self, group: str) -> str | None:
        if self._rank == 0:
            self.send("sound", group, 1)
            return None
        return self.recv(group, 0)

    def weights(self, group: str) -> int:
        return self.broadcast([1, 2, 3] if self._rank == 1 else None, [group], (group, 1))[2] + self._rank

    def first_weights(self, group: str) -> Any:
        return self.broadcast(self._rank, [(group, 2), (group, [0, 1])])

    def broadcast_to(self, groups: Any, src: Any) -> Any:
        return self.broadcast(1, groups, src)

    def modules(self) -> list[str]:
        return [name for name in ("torch", "numpy", "rich", "pydantic") if name in sys.modules]


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup[Talker]:
    with Talker.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="talk") as launched:
        yield launched


def test_a_worker_that_does_not_use_torch_does_not_import_it(group: WorkerGroup[Talker]) -> None:
    assert "torch" not in group.modules().wait()[0]


def test_a_ring_of_messages(group: WorkerGroup[Talker]) -> None:
    assert group.ring("talk").wait(timeout=20) == ["from 2", "from 0", "from 1"]


def test_each_rank_its_own(group: WorkerGroup[Talker]) -> None:
    received = group.exchange("talk").wait(timeout=20)
    assert [list(item.items()) for item in received] == [
        [(2, (2, 0)), (1, (1, 0))],
        [(2, (2, 1)), (0, (0, 1))],
        [(1, (1, 2)), (0, (0, 2))],
    ]


def test_a_payload_travels_with_an_object(group: WorkerGroup[Talker]) -> None:
    received = group.execute_on(0, 1).with_payload("talk").wait(timeout=20)
    assert received == [[], [([1, 2], {"version": 7}), ([3], 0), [4]]]


def test_broadcast(group: WorkerGroup[Talker]) -> None:
    assert group.weights("talk").wait(timeout=20) == [3, 4, 5]


def test_first_of_the_first_group_sends_where_no_source_is_named(group: WorkerGroup[Talker]) -> None:
    assert group.first_weights("talk").wait(timeout=20) == [2, 2, 2]


@pytest.mark.parametrize(
    ("groups", "src"), [("talk", ("talk", 0)), (["talk"], "talk:0"), ([("talk", 1.5)], ("talk", 0))]
)
def test_broadcast_without_members_is_refused_everywhere(group: WorkerGroup[Talker], groups: Any, src: Any) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.broadcast_to(groups, src).wait(timeout=20)
    assert caught.value.ranks == (0, 1, 2)
    assert all(isinstance(error, InvalidNameError) for error in caught.value.exceptions)


def test_tensors_and_dataclasses(group: WorkerGroup[Talker]) -> None:
    assert group.execute_on(0, 1).tensors("talk").wait(timeout=60)[1] == ("Batch", 3_000_015.0, ["a", "b"])


def test_a_mismatch_is_an_error_on_both_sides(group: WorkerGroup[Talker]) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.execute_on(0, 1).mismatch("talk").wait(timeout=60)
    assert caught.value.ranks == (0, 1)
    assert all(isinstance(error, MismatchError) for error in caught.value.exceptions)


def test_a_mismatch_does_not_spoil_the_calls_after_it(group: WorkerGroup[Talker]) -> None:
    # The sender's call may be over when its mismatch is reported.
    with suppress(WorkerGroupError):
        assert group.execute_on(0, 1).late_mismatch("talk").wait(timeout=60)[1] == "MismatchError"
    assert group.execute_on(0, 1).objects("talk").wait(timeout=60)[1] == "sound"
