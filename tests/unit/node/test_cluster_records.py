from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf_core.errors import ClusterError, RLinfError
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode


def record(name: str = "a", **changes: object) -> ClusterRecord:
    node = RecordedNode(0, "h", ("g",), "/opt/python", {"user": "me", "options": {"Compression": "yes"}}, "10.0.0.1")
    values = {
        "name": name,
        "id": "0badcafe",
        "file": "a.yaml",
        "address": "10.0.0.1:20000",
        "authenticated": True,
        "ports": (20000, 20999),
        "nodes": (node, node._replace(rank=1, host="i")),
        "since": 1.5,
    }
    return ClusterRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_saved_comes_back() -> None:
    cluster_records.save(record())
    assert cluster_records.load("a") == record()
    assert cluster_records.recorded() == record()
    assert cluster_records.recorded("a") == record()
    cluster_records.forget("a")
    assert cluster_records.recorded() is None
    cluster_records.forget("a")


def test_of_several_one_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_records.save(record("a"))
    cluster_records.save(record("b"))
    assert cluster_records.names() == ["a", "b"]
    with pytest.raises(ClusterError, match="several clusters are up: `a`, `b`"):
        cluster_records.recorded()
    assert cluster_records.recorded("none") is None
    monkeypatch.setenv("RLINF_CLUSTER", "b")
    assert cluster_records.recorded() == record("b")
    assert cluster_records.recorded("a") == record("a")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "nodes": [{"rank": 0}]}'])
def test_a_broken_record_is_one_error(text: str, state_home: Path) -> None:
    cluster_records.save(record())
    (state_home / "rlinf" / "clusters" / "a.json").write_text(text)
    with pytest.raises(RLinfError, match="the record of cluster `a` cannot be read"):
        cluster_records.load("a")


def test_the_folder_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_records.folder() == tmp_path / ".local" / "state" / "rlinf" / "clusters"


def test_which_node_is_here() -> None:
    made = record()
    assert made.here() is None
    nodes = (made.nodes[0], made.nodes[1]._replace(machine=node_facts.machine()), *made.nodes[2:])
    result = replace(made, nodes=nodes).here()
    assert result is not None
    assert result.rank == 1


@pytest.mark.parametrize("what", ["a file", "below a file", "read-only"])
def test_state_folder_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, state_home: Path, tmp_path: Path, what: str
) -> None:
    folder = state_home / "rlinf" / "clusters"
    if what == "read-only":
        # To root every folder of the disk is writable.
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        place = folder if what == "a file" else state_home / "rlinf"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("")
        assert cluster_records.names() == []
    with pytest.raises(RLinfError, match="the folder of cluster records cannot be used") as caught:
        cluster_records.save(record())
    assert (caught.value.where, "XDG_STATE_HOME" in str(caught.value.help)) == (str(folder), True)
