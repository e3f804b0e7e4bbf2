"""Where Ray cannot be started, it is not tried."""

from __future__ import annotations

import sys

import pytest

from rlinf_core.cluster import engine
from rlinf_core.errors import ClusterError


def test_without_standard_error_the_true_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(ClusterError, match="standard error is closed"):
        engine.connect(None, "test", may_start=True)
