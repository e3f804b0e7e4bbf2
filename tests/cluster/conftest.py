"""The machines that tests of bring-up share: five hosts in three groups, commanded over ssh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.spaces import why_not

NAMES = ("trainer0", "trainer1", "render0", "render1", "robot0")


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Machines `trainer0`, `trainer1`, `render0`, `render1` and `robot0`. A test gives them back as it found them."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Hosts(NAMES)
    try:
        yield made
    finally:
        made.end()
