from __future__ import annotations

import pytest

from rlinf_core import waiting
from rlinf_core.process import activity
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of waits."""
    clock = Clock()
    for module in (waiting, activity):
        monkeypatch.setattr(module, "time", clock)
    return clock
