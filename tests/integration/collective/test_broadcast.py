"""One object to many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import WorkerDiedError
from tests.waiting import until


def receive(side: Any, change: bool) -> list[float]:
    source = WorkerAddress("here", 0)
    value = side.group().broadcast(None, source)
    tensor = value["weights"]
    before = float(tensor.sum())
    if change:
        tensor.fill_(float(side.me.rank))
    side.group().send("changed", source)
    side.group().recv(source)
    after = [before, float(tensor.sum())]
    del value, tensor
    return after


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_every_member_gets_memory_of_its_own(make_cast: Any, size: int) -> None:
    cast = make_cast()
    peers = [cast.add(f"rollout:{rank}") for rank in range(1, 4)]
    for peer in peers:
        peer.begin(receive, True)
    group = cast.here.group()
    weights = {"weights": torch.ones(size)}
    assert group.broadcast(weights, cast.here.me) is weights
    for rank in range(1, 4):
        assert group.recv(WorkerAddress("rollout", rank)) == "changed"
    for rank in range(1, 4):
        group.send("go on", WorkerAddress("rollout", rank))
    assert [peer.result() for peer in peers] == [[size, rank * size] for rank in range(1, 4)]
    until(lambda: not cast.here.endpoint.shared_memory().used, "the end of the broadcast's use of shared memory")


@pytest.mark.nightly
def test_later_broadcast_hides_writes_to_an_earlier_one(make_cast: Any) -> None:
    cast = make_cast()
    peers = [cast.add(f"rollout:{rank}") for rank in range(1, 3)]

    def scribble(side: Any, rounds: int) -> list[float]:
        source = WorkerAddress("here", 0)
        sums = []
        for _ in range(rounds):
            tensor = side.group().broadcast(None, source)
            sums.append(float(tensor.sum()))
            tensor[::1000] = -1.0
            del tensor
            side.group().send(None, source)
        return sums

    for peer in peers:
        peer.begin(scribble, 5)
    group = cast.here.group()
    for number in range(5):
        group.broadcast(torch.full((500_000,), float(number)), cast.here.me)
        for rank in range(1, 3):
            group.recv(WorkerAddress("rollout", rank))
    assert [peer.result() for peer in peers] == [[500_000.0 * number for number in range(5)]] * 2


def test_an_asynchronous_broadcast_is_a_handle(make_cast: Any) -> None:
    cast = make_cast()
    peer = cast.add("rollout:1")
    peer.begin(receive, False)
    group = cast.here.group()
    value = {"weights": torch.ones(200_000)}
    work = group.broadcast(value, cast.here.me, async_op=True)
    assert work.wait() is value
    group.recv(WorkerAddress("rollout", 1))
    group.send(None, WorkerAddress("rollout", 1))
    assert peer.result() == [200_000, 200_000]


def test_a_dead_member_is_named_and_the_others_get_theirs(make_cast: Any) -> None:
    cast = make_cast()
    one, two = cast.add("rollout:1"), cast.add("rollout:2")
    two.kill()
    one.begin(receive, False)
    group = cast.here.group()
    with pytest.raises(WorkerDiedError, match="rollout:2"):
        group.broadcast({"weights": torch.ones(200_000)}, cast.here.me)
    group.recv(WorkerAddress("rollout", 1))
    group.send(None, WorkerAddress("rollout", 1))
    assert one.result() == [200_000, 200_000]
