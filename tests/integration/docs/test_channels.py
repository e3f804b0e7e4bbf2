"""docs/channels.md, typed from top to bottom."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_page_about_channels_prints_what_it_says(follow_page: Callable[..., str]) -> None:
    assert follow_page("channels.md") == "", "all that it prints is on the page"
