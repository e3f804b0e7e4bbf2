"""What a cluster refuses before Ray is started, or joined."""

from __future__ import annotations

import logging

import pytest

from rlinf_core.cluster import cluster as module
from rlinf_core.cluster import engine
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import EnvironmentVariableError


class ConnectedError(Exception):
    """Ray would be started now."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise ConnectedError

    monkeypatch.setattr(engine, "connect", connect)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RLINF_TIMEOUT", "-3"), ("RLINF_CALL_TIMEOUT", "inf"), ("RLINF_SHM_LIMIT", "lots"), ("RLINF_NET_IF", "none0")],
)
def test_a_wrong_variable_is_told_at_once(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=f"`{name}` is `{value}`"):
        Cluster(num_nodes=1)


def test_a_variable_that_is_none_of_ours_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "current_session", lambda: None)
    module._warn_of_unknown.cache_clear()
    monkeypatch.setenv("RLINF_TIMOUT", "3")
    monkeypatch.setenv("RLINF_NET_IF", "lo")
    with caplog.at_level(logging.WARNING, logger="rlinf"):
        for _ in range(2):
            with pytest.raises(ConnectedError):
                Cluster(num_nodes=1)
    assert [record.getMessage() for record in caplog.records if "RLINF_TIMOUT" in record.getMessage()] == [
        "`RLINF_TIMOUT` in the environment is no variable of rlinf; did you mean `RLINF_TIMEOUT`?"
    ]
