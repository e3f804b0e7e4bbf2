from __future__ import annotations

import pytest

from rlinf_core.manager.ownership import Ownership, Resource, ResourceKind


def group(name: str) -> Resource:
    return Resource(ResourceKind.GROUP, name)


def socket(name: str, node: int = 0) -> Resource:
    return Resource(ResourceKind.SOCKET, name, node)


def channel(name: str) -> Resource:
    return Resource(ResourceKind.CHANNEL, name)


@pytest.fixture
def job() -> Ownership:
    """The driver has two groups; actor:0 has launched one of its own, which has launched another."""
    job = Ownership()
    job.claim(group("actor"), "driver")
    job.claim(group("env"), "driver")
    for rank in range(2):
        job.claim(socket(f"actor-{rank}.sock"), f"actor:{rank}")
    job.claim(socket("env.sock"), "env:0")
    job.claim(channel("data"), "env:0")
    job.claim(group("helpers"), "actor:0")
    job.claim(socket("helper.sock"), "helpers:1")
    job.claim(group("deeper"), "helpers:1")
    job.claim(Resource(ResourceKind.SEGMENT, "deep", 1), "deeper:0")
    return job


def test_a_worker_takes_what_it_owns_along_and_nothing_else(job: Ownership) -> None:
    assert job.gone("actor:1") == (socket("actor-1.sock"),)
    assert job.gone("actor:1") == ()
    assert job.owner(socket("actor-0.sock")) == "actor:0"


def test_a_workers_groups_go_with_it_inner_ones_first(job: Ownership) -> None:
    assert job.gone("actor:0") == (
        group("deeper"),
        group("helpers"),
        socket("helper.sock"),
        socket("actor-0.sock"),
        Resource(ResourceKind.SEGMENT, "deep", 1),
    )
    assert job.owner(socket("env.sock")) == "env:0"


def test_a_channel_outlives_the_worker_that_created_it(job: Ownership) -> None:
    assert job.owner(channel("data")) == "driver"
    assert job.gone("env:0") == (socket("env.sock"),)
    assert job.owner(channel("data")) == "driver"


def test_with_the_driver_everything_goes(job: Ownership) -> None:
    released = job.gone("driver")
    assert len(released) == 10
    assert [one.name for one in released if one.kind is ResourceKind.GROUP] == ["deeper", "helpers", "env", "actor"]
    assert [one.kind for one in released] == sorted((one.kind for one in released), key=list(ResourceKind).index)
    assert job.owned_by("driver") == ()


def test_a_group_that_is_shut_down(job: Ownership) -> None:
    job.claim(socket("env-2.sock"), "env2:0")
    assert job.gone("env") == (socket("env.sock"),)
    assert job.owner(socket("env-2.sock")) == "env2:0"
    assert job.gone("nobody", members=("actor:1", "env2:0")) == (socket("env-2.sock"), socket("actor-1.sock"))


def test_nested_groups_are_found_by_address() -> None:
    job = Ownership()
    job.claim(socket("nested"), "env:0:3")
    assert job.gone("env:00") == ()
    assert job.gone("env:0") == (socket("nested"),)


def test_what_is_released_or_handed_over_is_not_released_again(job: Ownership) -> None:
    assert job.release(socket("env.sock"))
    assert not job.release(socket("env.sock"))
    job.claim(socket("actor-1.sock"), "env:0")
    assert job.gone("actor:1") == ()
    assert job.owned_by("env:0") == (socket("actor-1.sock"),)
    assert job.owned_by("driver") == (group("actor"), group("env"), channel("data"))


def test_the_same_name_on_two_nodes_is_two_things() -> None:
    job = Ownership()
    job.claim(socket("s", 0), "a:0")
    job.claim(socket("s", 1), "b:0")
    assert job.gone("a:0") == (socket("s", 0),)
    assert job.owner(socket("s", 1)) == "b:0"
