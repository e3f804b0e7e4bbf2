"""Time limits that know the load of the machine."""

from __future__ import annotations

import os

import pytest

from rlinf_core.collective.connections.settings import Settings
from rlinf_core.waiting import contact_seconds, stretched


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 30.0), (2.0, 30.0), (6.0, 90.0), (60.0, 300.0)])
def test_a_limit_grows_with_the_load_of_each_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, seconds: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("RLINF_CONNECT_TIMEOUT", raising=False)
    assert stretched(30.0) == seconds
    assert contact_seconds() == Settings.from_environment().connect_timeout == seconds
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "12")
    assert contact_seconds() == Settings.from_environment().connect_timeout == 12.0


def test_a_system_that_tells_no_load_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert stretched(30.0) == 30.0
