"""The moment at which a run counts as hung."""

from __future__ import annotations

from tests.chaos.life_signs import LifeSigns


def test_run_without_any_sign_is_hung() -> None:
    signs = LifeSigns(90.0, 0.0)
    signs.note(10, 10, 50.0)
    signs.note(10, 10, 140.0)
    assert (signs.are_gone(140.0), signs.are_gone(140.1)) == (False, True)


def test_words_count_as_signs_for_four_deadlines() -> None:
    signs = LifeSigns(90.0, 0.0)
    for now in range(0, 1000, 30):
        signs.note(0, now, float(now))
    assert (signs.are_gone(360.0), signs.are_gone(1000.0)) == (False, True)


def test_fault_gives_time_anew() -> None:
    signs = LifeSigns(90.0, 0.0)
    signs.disturbed(80.0)
    assert (signs.are_gone(170.0), signs.are_gone(171.0)) == (False, True)
