"""The pages of docs/ that are typed from top to bottom, by a newcomer who does not skip a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_tutorial_prints_what_it_says(follow_page: Callable[..., str]) -> None:
    assert follow_page("tutorial.md") == "", "all that it prints is on the page"
