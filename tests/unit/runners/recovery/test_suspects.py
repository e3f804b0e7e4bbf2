"""Which items are tried alone, and which are set aside."""

from __future__ import annotations

from rlinf_core.runners.recovery.suspects import Suspects

SHARE = {"1": "one", "2": "two", "3": "three"}


def test_items_of_one_death_are_not_suspected() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "`rollout:0` died")
    assert suspects.due() == {}


def test_items_of_two_deaths_are_tried_alone() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "first")
    suspects.died_of({"2": "two", "9": "nine"}, "second")
    assert suspects.due() == {"2": "two"}


def test_item_that_kills_alone_is_set_aside_with_its_deaths() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    suspects.lived("1")
    assert suspects.killed("2", "third") == ["first", "second", "third"]
    assert suspects.set_aside == {"2"}
    assert suspects.due() == {"3": "three"}
    suspects.died_of(SHARE, "fourth")
    assert "2" not in suspects.due()


def test_named_item_is_set_aside_at_the_third_death() -> None:
    suspects: Suspects[str] = Suspects()
    deaths = [suspects.died_of_one("2", "two", reason) for reason in ("first", "second", "third", "fourth")]
    assert deaths == [[], [], ["first", "second", "third"], []]
    assert suspects.set_aside == {"2"}


def test_item_that_was_there_by_chance_is_forgotten() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    for name in SHARE:
        suspects.lived(name)
    suspects.died_of(SHARE, "third")
    assert (suspects.due(), suspects.set_aside) == ({}, frozenset())
