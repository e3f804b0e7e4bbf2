from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.supervision.rig import Job


@pytest.fixture
def job() -> Iterator[Job]:
    started = Job()
    yield started
    started.close()
