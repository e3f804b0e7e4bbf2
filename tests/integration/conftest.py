"""One embedded Ray for all integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlinf_core.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=1) as started:
        yield started
