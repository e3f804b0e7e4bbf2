from __future__ import annotations

import pytest

from rlinf_core import operation_board, waiting
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of waits."""
    clock = Clock()
    for module in (waiting, operation_board):
        monkeypatch.setattr(module, "time", clock)
    return clock
