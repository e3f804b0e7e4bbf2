"""docs/worker-api.md, typed from top to bottom."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_page_prints_what_it_says(follow_page: Callable[..., str]) -> None:
    assert follow_page("worker-api.md", seconds=220) == "", "all that it prints is on the page"
