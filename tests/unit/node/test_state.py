from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlinf_core.errors import ClusterError, ConfigError, RLinfError
from rlinf_core.node import node_facts, state
from rlinf_core.node.state import ClusterRecord, RecordedNode


def record(name: str = "a", **changes: object) -> ClusterRecord:
    node = RecordedNode(0, "h", ("g",), "/opt/python", {"user": "me", "options": {"Compression": "yes"}}, "10.0.0.1")
    values = {
        "name": name,
        "id": state.cluster_id(name),
        "file": "a.yaml",
        "address": "10.0.0.1:20000",
        "authenticated": True,
        "ports": (20000, 20999),
        "nodes": (node, node._replace(rank=1, host="i")),
        "since": 1.5,
    }
    return ClusterRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_saved_comes_back() -> None:
    state.save(record())
    assert state.load("a") == record()
    assert state.recorded() == record()
    assert state.recorded("a") == record()
    state.forget("a")
    assert state.recorded() is None
    state.forget("a")


def test_of_several_one_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state.save(record("a"))
    state.save(record("b"))
    assert state.names() == ["a", "b"]
    with pytest.raises(ClusterError, match="several clusters are up: `a`, `b`"):
        state.recorded()
    assert state.recorded("none") is None
    monkeypatch.setenv("RLINF_CLUSTER", "b")
    assert state.recorded() == record("b")
    assert state.recorded("a") == record("a")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "nodes": [{"rank": 0}]}'])
def test_a_broken_record_is_one_error(text: str, state_home: Path) -> None:
    state.save(record())
    (state_home / "rlinf" / "clusters" / "a.json").write_text(text)
    with pytest.raises(RLinfError, match="the record of cluster `a` cannot be read"):
        state.load("a")


def test_a_token_that_others_could_read_is_not_used() -> None:
    state.token_of("a")
    state.token_file("a").chmod(0o644)
    with pytest.raises(RLinfError, match="readable by others"):
        state.token_of("a")


def test_a_token_is_made_once() -> None:
    first = state.token_of("a")
    assert state.token_of("a") == first
    assert state.token_of("a", fresh=True) != first


@pytest.mark.parametrize(
    ("file", "name"),
    [("conf/hetero18.yaml", "hetero18"), ("-", "default"), ("a b;$(c).yaml", "a-b-c"), ("hetero18", "hetero18")],
)
def test_a_cluster_is_named_like_its_file(file: str, name: str) -> None:
    assert state.cluster_name(file) == name


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a b", "x" * 65])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        state.cluster_name("a.yaml", name)


def test_the_folder_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state.folder() == tmp_path / ".local" / "state" / "rlinf" / "clusters"


def test_which_node_is_here() -> None:
    made = record()
    assert made.here() is None
    nodes = (made.nodes[0], made.nodes[1]._replace(machine=node_facts.machine()), *made.nodes[2:])
    found = replace(made, nodes=nodes).here()
    assert found is not None
    assert found.rank == 1


def test_the_lock_is_free_again_afterwards() -> None:
    with state.locked("a"):
        pass
    with state.locked("a"), pytest.raises(RLinfError, match="is at work on cluster `a`"), state.locked("a"):
        pass
