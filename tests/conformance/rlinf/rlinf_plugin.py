"""A pytest plugin for RLinf's unit tests: refusals may be in our words, and what we lack is skipped with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core import RLinfError
from tests.conformance.rlinf.rlinf_names import reason

_raises = pytest.raises


@contextmanager
def _refused(expected: Any, *, match: str | None = None) -> Iterator[Any]:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    with _raises((*kinds, RLinfError)) as caught:
        yield caught
    if match is not None and not isinstance(caught.value, RLinfError):
        assert re.search(match, str(caught.value))


pytest.raises = _refused  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = reason(item.nodeid)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        module: Any = getattr(item, "module", None)
        if hasattr(module, "DistributedChannel"):
            # Every test of a channel makes one, and those that use it are skipped.
            made = SimpleNamespace(_distributed=True, _channel_actors_by_rank=range(module.NUM_SIMULATED_NODES))
            module.DistributedChannel = SimpleNamespace(create=lambda name, made=made: made)
