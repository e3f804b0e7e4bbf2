"""README's program runs as it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_program_of_readme_greets_by_rank(follow_page: Callable[..., str]) -> None:
    assert follow_page("../README.md").startswith("['rank 0 of ")
