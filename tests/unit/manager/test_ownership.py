from __future__ import annotations

import pytest

from rlinf_core.manager.ownership import Ownership


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
