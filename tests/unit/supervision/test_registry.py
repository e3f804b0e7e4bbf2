from __future__ import annotations

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import InvalidNameError, PeerNotFoundError, UnknownGroupError, WorkerDiedError
from rlinf_core.supervision.lives import CLOSED, Life, NotYet, Ownership, WorkerRecord, WorkerRegistry

ACTOR_0 = WorkerAddress("actor", 0)
ACTOR_1 = WorkerAddress("actor", 1)


@pytest.fixture
def registry() -> WorkerRegistry:
    registry: WorkerRegistry = WorkerRegistry()
    assert registry.open_group("actor", 2) == 1
    return registry


def test_a_worker_can_be_reached_once_it_is_ready(registry: WorkerRegistry) -> None:
    assert registry.look_up(ACTOR_0) == NotYet("`actor:0` is launching")
    assert registry.ready(ACTOR_0, 1, "info 0", "node 0")
    entry = registry.look_up(ACTOR_0)
    assert isinstance(entry, WorkerRecord)
    assert (entry.info, entry.node, entry.life) == ("info 0", "node 0", Life.READY)
    assert registry.groups() == {"actor": 2}
    assert [worker.life for worker in registry.workers("actor")] == [Life.READY, Life.LAUNCHING]


def test_an_unknown_group_may_still_come_and_near_names_are_told(registry: WorkerRegistry) -> None:
    assert registry.look_up(WorkerAddress("actr", 0)) == NotYet(
        "no group is named `actr`; it may still be launched", "did you mean `actor`?"
    )


def test_a_group_that_was_not_declared_is_wrong_at_once(registry: WorkerRegistry) -> None:
    registry.declare(["actor", "rollout"])
    with pytest.raises(UnknownGroupError, match="did you mean `rollout`"):
        registry.look_up(WorkerAddress("rolout", 0))
    waits = registry.look_up(WorkerAddress("rollout", 0))
    assert waits == NotYet("the group `rollout` is declared but not launched yet")


def test_a_group_that_was_launched_needs_no_declaration(registry: WorkerRegistry) -> None:
    registry.declare(["rollout"])
    registry.ready(ACTOR_0, 1, "info")
    assert isinstance(registry.look_up(ACTOR_0), WorkerRecord)


def test_groups_of_workers_are_not_declared(registry: WorkerRegistry) -> None:
    registry.declare(["actor"])
    assert isinstance(registry.look_up(WorkerAddress("actor", (0, 1))), NotYet)
    registry.open_group("actor:0", 2)
    registry.ready(WorkerAddress("actor", (0, 1)), 1, "nested")
    entry = registry.look_up(WorkerAddress("actor", (0, 1)))
    assert isinstance(entry, WorkerRecord)
    assert entry.info == "nested"


def test_a_rank_that_does_not_exist_is_wrong_at_once(registry: WorkerRegistry) -> None:
    with pytest.raises(PeerNotFoundError, match="`actor` has no rank 2") as caught:
        registry.look_up(WorkerAddress("actor", 2))
    assert caught.value.address == "actor:2"
    assert caught.value.why == "it has 2 workers, ranks 0 to 1"
    with pytest.raises(PeerNotFoundError, match="is a group"):
        registry.look_up(WorkerAddress("actor"))


def test_the_dead_are_named_with_their_cause(registry: WorkerRegistry) -> None:
    registry.ready(ACTOR_0, 1, "info", "node 0 (10.0.0.1)")
    assert registry.died(ACTOR_0, 1, now=5.0)
    assert not registry.died(ACTOR_0, 1, now=6.0, cause="killed by the kernel: out of memory")
    with pytest.raises(WorkerDiedError) as caught:
        registry.look_up(ACTOR_0)
    assert (caught.value.address, caught.value.node) == ("actor:0", "node 0 (10.0.0.1)")
    assert caught.value.cause == "killed by the kernel: out of memory"
    record = registry.record(ACTOR_0)
    assert record is not None
    assert (record.died_at, record.info) == (5.0, None)
    assert not registry.ready(ACTOR_0, 1, "late info")


def test_a_name_that_a_channel_has_is_said_to_be_a_channels(registry: WorkerRegistry) -> None:
    registry.open_group("replay", 1, channel=True)
    with pytest.raises(InvalidNameError, match=r"a channel named `replay` already exists(.|\n)*Channel.connect"):
        registry.open_group("replay", 1)
    with pytest.raises(InvalidNameError, match="a group named `actor` is running"):
        registry.open_group("actor", 1, channel=True)
    assert [registry.is_channel(name) for name in ("replay", "actor", "nobody")] == [True, False, False]


def test_the_name_of_a_channel_that_was_closed_stays_its_own(registry: WorkerRegistry) -> None:
    registry.open_group("replay", 1, channel=True)
    registry.died(WorkerAddress("replay", 0), 1, now=1.0, cause=CLOSED)
    with pytest.raises(InvalidNameError, match="a channel named `replay` existed and is closed"):
        registry.open_group("replay", 1, channel=True)
    registry.open_group("inbox", 1, channel=True)
    registry.died(WorkerAddress("inbox", 0), 1, now=1.0, cause="it was killed")
    assert registry.open_group("inbox", 1, channel=True) == 2


def test_a_group_can_be_launched_again_under_its_name(registry: WorkerRegistry) -> None:
    registry.ready(ACTOR_0, 1, "old")
    with pytest.raises(InvalidNameError, match="is running"):
        registry.open_group("actor", 1)
    registry.died(ACTOR_0, 1, now=1.0)
    registry.died(ACTOR_1, 1, now=1.0)
    assert registry.open_group("actor", 1) == 2
    assert registry.ready(ACTOR_0, 2, "new")
    # What the old life still says does not count.
    assert not registry.ready(ACTOR_0, 1, "ghost")
    assert not registry.died(ACTOR_0, 1, now=9.0)
    entry = registry.look_up(ACTOR_0)
    assert isinstance(entry, WorkerRecord)
    assert entry.info == "new"


def test_a_rank_is_launched_again_with_an_incarnation_of_its_own(registry: WorkerRegistry) -> None:
    assert registry.open_group("env", 2) == 1
    first, second = (WorkerAddress("env", rank) for rank in range(2))
    assert registry.ready(first, 1, "a")
    assert registry.ready(second, 1, "b")
    assert registry.died(second, 1, 1.0)
    assert registry.reopen(second) == 2
    assert isinstance(registry.look_up(second), NotYet)
    # What is late from the life before counts for nothing.
    assert not registry.ready(second, 1, "b")
    assert not registry.died(second, 1, 2.0)
    assert registry.ready(second, 2, "c")
    assert [worker.incarnation for worker in registry.workers("env")] == [1, 2]
    assert registry.incarnation("env") == 1
    registry.close_group("env")
    assert registry.open_group("env", 1) == 3


def test_a_closed_group_frees_its_name_and_not_its_incarnation(registry: WorkerRegistry) -> None:
    assert registry.close_group("actor") == (ACTOR_0, ACTOR_1)
    assert registry.close_group("actor") == ()
    assert registry.record(ACTOR_0) is None
    with pytest.raises(UnknownGroupError):
        registry.workers("actor")
    assert registry.open_group("actor", 3) == 2


def test_a_name_that_cannot_be_one_is_refused(registry: WorkerRegistry) -> None:
    with pytest.raises(InvalidNameError):
        registry.open_group("", 1)
    assert registry.record(WorkerAddress("actor")) is None
    assert registry.record(WorkerAddress("nobody", 3)) is None


@pytest.fixture
def job() -> Ownership:
    """The driver has two groups; actor:0 has launched two of its own, one of which has launched another."""
    job = Ownership()
    job.claim("actor", "driver")
    job.claim("env", "driver")
    job.claim("helpers", "actor:0")
    job.claim("deeper", "helpers:1")
    job.claim("judges", "actor:0")
    return job


def test_a_worker_takes_what_it_launched_along_and_nothing_else(job: Ownership) -> None:
    assert job.gone("actor:1") == ()
    assert job.gone("helpers:1") == ("deeper",)
    assert job.gone("helpers:1") == ()
    assert job.gone("actor:0") == ("judges", "helpers")


def test_a_workers_groups_go_with_it_inner_ones_first(job: Ownership) -> None:
    assert job.gone("actor:0") == ("judges", "deeper", "helpers")
    assert job.gone("driver") == ("env", "actor")


def test_with_the_driver_everything_goes(job: Ownership) -> None:
    assert job.gone("driver") == ("judges", "deeper", "helpers", "env", "actor")
    assert job.gone("driver") == ()


def test_groups_that_are_named_after_their_parents_are_found(job: Ownership) -> None:
    job.claim("env:0", "env:0")
    job.claim("env:0:3", "env:0:3")
    assert job.gone("env:00") == ()
    assert job.gone("env:0") == ("env:0:3", "env:0")


def test_what_is_released_or_handed_over_does_not_end_again(job: Ownership) -> None:
    job.release("judges")
    job.release("judges")
    job.claim("helpers", "env:0")
    assert job.gone("actor:0") == ()
    assert job.gone("env:0") == ("helpers", "deeper")
