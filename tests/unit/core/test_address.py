from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import InvalidNameError

groups = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), min_size=1)
addresses = st.builds(WorkerAddress, groups, st.lists(st.integers(0, 10**6), max_size=5))


@given(addresses)
def test_a_name_leads_back_to_its_address(address: WorkerAddress) -> None:
    assert WorkerAddress.from_name(address.get_name()) == address


@given(addresses, st.integers(0, 1000))
def test_a_child_knows_its_parent(address: WorkerAddress, rank: int) -> None:
    child = address.get_child_address(rank)
    assert child.get_parent_address() == address
    assert child.rank == rank
    assert child.get_parent_rank() == (address.rank if address.ranks else None)


@given(addresses, addresses)
def test_it_is_a_value(one: WorkerAddress, other: WorkerAddress) -> None:
    assert (one == other) == (one.get_name() == other.get_name())
    assert hash(copy.deepcopy(one)) == hash(one)
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one < other) + (other < one) + (one == other) == 1


def test_it_is_written_as_group_and_ranks() -> None:
    assert WorkerAddress("Worker_group_MyWorker", (0, 1)).get_name() == "Worker_group_MyWorker:0:1"
    assert str(WorkerAddress("actor", 3)) == "actor:3"
    assert repr(WorkerAddress("actor", 3)) == "WorkerAddress('actor:3')"
    assert WorkerAddress("actor", [1, 2]) == WorkerAddress("actor", (1, 2))


def test_ranks_order_as_numbers() -> None:
    names = ["b:0", "a:10", "a:2", "a:2:0", "a"]
    assert [a.get_name() for a in sorted(map(WorkerAddress.from_name, names))] == ["a", "a:2", "a:2:0", "a:10", "b:0"]


def test_it_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerAddress("a", 0).ranks = (1,)  # pyright: ignore[reportAttributeAccessIssue]


def test_it_pickles_small() -> None:
    assert len(pickle.dumps(WorkerAddress("actor", 3))) < 80


def test_the_top_has_no_parent_worker() -> None:
    assert WorkerAddress("actor", 3).get_parent_rank() is None
    assert WorkerAddress("actor", 3).get_parent_address() == WorkerAddress("actor")
    assert WorkerAddress("actor").get_parent_address() is None
    with pytest.raises(InvalidNameError, match="a group, not a worker"):
        _ = WorkerAddress("actor").rank


@pytest.mark.parametrize("name", ["", ":0", "a:", "a::0", "a:-1", "a:x", "a:01", "a: 1", "a:1_0", "a:²", "a:٣"])
def test_what_is_no_address_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress.from_name(name)


@pytest.mark.parametrize(("group", "ranks"), [("", 0), ("a:b", 0), ("a", -1), ("a", (0, -1)), ("a", True)])
def test_what_cannot_be_one_is_refused(group: str, ranks: int | tuple[int, ...]) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress(group, ranks)


@pytest.mark.parametrize("rank", [1.0, "1", None, -1, True])
def test_what_is_no_rank_is_refused_though_it_may_equal_one(rank: object) -> None:
    with pytest.raises(InvalidNameError, match="is not a rank of a worker"):
        WorkerAddress("actor").get_child_address(rank)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", [5, None, b"actor:0"])
def test_what_is_no_text_is_no_name(name: object) -> None:
    with pytest.raises(InvalidNameError):
        WorkerAddress.from_name(name)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidNameError):
        WorkerAddress(name)  # pyright: ignore[reportArgumentType]
