"""Which cluster a driver joins, and with which token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf_core.errors import ClusterError
from rlinf_core.node import attach, cluster_records
from rlinf_core.node.attach import Known
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode

LAPTOP = Known("laptop", "127.0.0.1:20000", "/t/laptop", 1)
LAB = Known("lab", "10.0.0.1:20000", "/t/lab", 5)


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    """The clusters that run on this machine."""
    result: list[Known] = []
    monkeypatch.setattr(attach, "_running_here", lambda: iter(result))
    for name in ("RLINF_ADDRESS", "RLINF_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    return result


def test_one_machine_joins_the_cluster_of_one_machine(running: list[Known]) -> None:
    assert attach.destination(None, 1, may_start=True) is None
    running += [LAB]
    assert attach.destination(None, 1, may_start=True) is None
    assert attach.destination(None, None, may_start=True) == LAB
    running += [LAPTOP]
    assert attach.destination(None, 1, may_start=True) == LAPTOP
    assert attach.destination("local", 1, may_start=True) is None
    with pytest.raises(ClusterError, match="several clusters: `lab`, `laptop`"):
        attach.destination(None, None, may_start=True)


def test_the_variable_names_one(running: list[Known], monkeypatch: pytest.MonkeyPatch) -> None:
    running += [LAPTOP, LAB]
    monkeypatch.setenv("RLINF_CLUSTER", "lab")
    assert attach.destination(None, 1, may_start=True) == LAB
    monkeypatch.setenv("RLINF_CLUSTER", "labs")
    with pytest.raises(ClusterError, match="no cluster `labs` is known here") as caught:
        attach.destination(None, 1, may_start=True)
    assert caught.value.why == "known are `lab`, `laptop`"


def test_several_nodes_need_a_cluster(running: list[Known]) -> None:
    with pytest.raises(ClusterError, match="no cluster is running that could be joined"):
        attach.destination(None, 5, may_start=False)
    running += [LAB]
    assert attach.destination(None, 5, may_start=False) == LAB


@pytest.mark.parametrize("address", ["127.0.0.1:20000", "localhost:20000"])
def test_an_address_finds_its_cluster(running: list[Known], monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RLINF_ADDRESS", address)
    assert attach.destination(None, 1, may_start=True) == address
    running += [LAB, LAPTOP]
    assert attach.destination(None, 1, may_start=True) == LAPTOP
    assert attach.destination("10.0.0.9:20000", 1, may_start=True) == "10.0.0.9:20000"


def test_an_address_finds_the_record_of_its_cluster() -> None:
    node = RecordedNode(0, "h", (), "/opt/python", {})
    cluster_records.save(ClusterRecord("far", "1", "far.yaml", "10.0.0.7:20000", True, (20000, 20999), (node,)))
    (cluster_records.folder() / "broken.json").write_text("{")
    result = attach.destination("10.0.0.7:20000", 1, may_start=True)
    assert result == Known("far", "10.0.0.7:20000", str(cluster_records.token_file("far")), 1, runs_here=False)


def test_the_token_of_the_cluster_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("abc")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    attach.prepare(LAB._replace(token_path=str(token)))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
    assert "RAY_AUTH_TOKEN" not in os.environ
    attach.prepare(LAB._replace(token_path=None))
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_named_token_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("abc")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    attach.prepare(None)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_missing_token_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ClusterError, match="this process has no token for Ray"):
        attach.prepare(None)
