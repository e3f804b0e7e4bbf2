"""What a cluster refuses before Ray is started, or joined."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import cluster as module
from rlinf_core.cluster import engine
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, EnvironmentVariableError
from rlinf_core.topology import ClusterTopology, NodeInfo


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
        "`RLINF_TIMOUT` in the environment is not a variable of rlinf; did you mean `RLINF_TIMEOUT`?"
    ]


@pytest.mark.parametrize("num_nodes", [0, -1, "1", 1.5, True, [1]])
def test_what_is_no_number_of_nodes(num_nodes: Any) -> None:
    with pytest.raises(ClusterError, match=r"a cluster of .* nodes was requested"):
        Cluster(num_nodes)


@pytest.mark.parametrize("node_rank", [-1, 1, "0", 0.0, None])
def test_what_is_no_node(node_rank: Any) -> None:
    cluster = object.__new__(Cluster)
    cluster.topology = ClusterTopology.from_nodes([NodeInfo(0)])
    assert cluster.get_node_info(0).rank == 0
    with pytest.raises(ClusterError, match="there is no node") as caught:
        cluster.get_node_info(node_rank)
    assert repr(node_rank) in str(caught.value)


def test_worker_that_leaves_its_cluster_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end_all() -> list[Any]:
        ended.append("groups")
        return []

    monkeypatch.setattr(engine, "end_all", end_all)
    monkeypatch.setattr(engine, "disconnect", lambda: ended.append("connection") or [])
    entered: list[object] = []
    monkeypatch.setattr(module, "enter_session", entered.append)
    cluster = object.__new__(Cluster)
    cluster.session = Session("job", b"secret", member=WorkerAddress.from_name("env:0"))
    with cluster:
        pass
    assert (ended, entered) == (["groups"], [])
