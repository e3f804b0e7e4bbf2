"""Ranks share a store with each other, and with nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, PrefixStore

from recipes.training.sharding import RankStore
from tests.unit.supervision.rig import SECONDS, Job

pytestmark = pytest.mark.security
StoreOf = Callable[[str], PrefixStore]


@pytest.fixture
def job() -> Iterator[Job]:
    started = Job()
    yield started
    started.close()


@pytest.fixture
def store_of(job: Job) -> Iterator[StoreOf]:
    """The store of a worker as torch sees it, through the C++ that calls it."""
    kept: list[RankStore] = []

    def make(name: str) -> PrefixStore:
        kept.append(RankStore(job.join(name), SECONDS))
        return PrefixStore("group", kept[-1])

    yield make
    kept.clear()


def test_one_rank_reads_what_another_has_stored(store_of: StoreOf) -> None:
    first, second = store_of("actor:0"), store_of("actor:1")
    first.set("address", b"\x00\xff")
    assert second.get("address") == b"\x00\xff"
    assert (first.add("count", 2), second.add("count", 3)) == (2, 5)
    assert (first.check(["address", "count"]), first.check(["address", "other"])) == (True, False)


def test_rank_waits_until_all_keys_are_there(store_of: StoreOf) -> None:
    first, second = store_of("actor:0"), store_of("actor:1")
    result: list[bytes] = []
    waiting = threading.Thread(target=lambda: (second.wait(["a", "b"]), result.append(second.get("b"))), daemon=True)
    waiting.start()
    first.set("a", "1")
    assert not result
    first.set("b", "2")
    waiting.join(SECONDS)
    assert result == [b"2"]


def test_wait_ends_at_its_limit_as_one_of_torch_does(store_of: StoreOf) -> None:
    store = store_of("actor:1")
    with pytest.raises(DistStoreError, match=r"`actor:1` has waited 0\.05 s for another rank of its group .* group/a"):
        store.wait(["a"], timedelta(seconds=0.05))
    # The reply that came too late is for nobody.
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_other_group_has_another_store(store_of: StoreOf) -> None:
    actor, critic = store_of("actor:0"), store_of("critic:0")
    actor.set("address", "here")
    assert not critic.check(["address"])
    critic.set("address", "there")
    assert actor.get("address") == b"here"


def test_relaunched_group_begins_with_an_empty_store(job: Job) -> None:
    driver = job.join("driver")
    worker = job.worker(driver, "actor:0")
    RankStore(worker, SECONDS).set("address", "of before")
    driver.close_group("actor")
    assert not RankStore(job.worker(driver, "actor:0"), SECONDS).check(["address"])


def test_value_is_removed(job: Job) -> None:
    store = RankStore(job.join("actor:0"), SECONDS)
    store.set("key", "value")
    assert (store.deleteKey("key"), store.deleteKey("key"), store.check(["key"])) == (True, False, False)
