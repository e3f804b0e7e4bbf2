"""The page that shows problems and rewards of one's own: its examples print what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(180)
def test_the_page_prints_what_it_says(follow_page: Callable[..., str]) -> None:
    assert follow_page("rewards-and-data.md") == "", "all that it prints is on the page"
