"""A raylet that was killed is no node, although Ray lists it beside the one that serves in its place."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.cluster import joining
from rlinf_core.cluster.engine import RayEngine
from rlinf_core.cluster.joining import join
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError


def raylet(ray_id: str, rank: int, place: tuple[str, int]) -> dict[str, Any]:
    labels = {"rlinf.io/rank": str(rank)}
    address, port = place
    return {
        "NodeID": ray_id.encode().hex(),
        "NodeManagerAddress": address,
        "NodeManagerPort": port,
        "Alive": True,
        "Labels": labels,
    }


@pytest.fixture
def places() -> Iterator[list[tuple[str, int]]]:
    """Where raylets of two machines listen."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.2", 0)) as second:
        yield [first.getsockname(), second.getsockname()]


def joined(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], starts: dict[str, int]) -> list[str]:
    """Return the nodes that a job of two nodes joins."""
    context = SimpleNamespace(get_node_id=lambda: "")
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "0.01")
    monkeypatch.setattr(
        joining, "ray_api", lambda: SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context)
    )
    infos = {ray_id.encode(): SimpleNamespace(start_time_ms=start) for ray_id, start in starts.items()}
    monkeypatch.setattr(
        joining, "gcs_client", lambda address: SimpleNamespace(get_all_node_info=lambda timeout: infos), raising=False
    )
    monkeypatch.setattr(joining, "answer", lambda *_: None)
    seats = join(RayEngine("head:6379", embedded=False), Session("job", bytes(32)), None, 2, lambda *_: "asked")
    return [bytes.fromhex(member.ray_id).decode() for member in seats.members]


def test_later_raylet_of_a_port_is_the_node(monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]]) -> None:
    head, other = places
    nodes = [raylet("new", 1, other), raylet("head", 0, head), raylet("killed", 1, other)]
    assert joined(monkeypatch, nodes, {"head": 1, "killed": 2, "new": 3}) == ["head", "new"]


def test_raylet_whose_port_nobody_serves_is_no_node(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]]
) -> None:
    head, other = places
    with socket.create_server((other[0], 0)) as closed:
        before = closed.getsockname()
    nodes = [raylet("killed", 1, before), raylet("head", 0, head), raylet("new", 1, other)]
    assert joined(monkeypatch, nodes, {"head": 1, "killed": 2, "new": 3}) == ["head", "new"]


def test_raylet_killed_on_the_head_is_no_node(monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]]) -> None:
    head, other = places
    nodes = [raylet("old", 0, head), raylet("older", 0, head), raylet("head", 0, head), raylet("new", 1, other)]
    assert joined(monkeypatch, nodes, {"older": 1, "old": 2, "head": 3, "new": 1}) == ["head", "new"]


def test_two_raylets_that_both_serve_are_two_nodes(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]]
) -> None:
    head, other = places
    with socket.create_server((other[0], 0)) as third:
        nodes = [raylet("head", 0, head), raylet("one", 1, other), raylet("two", 2, third.getsockname())]
        with pytest.raises(ClusterError, match="2 nodes are requested, but the cluster has 3"):
            joined(monkeypatch, nodes, {"head": 1, "one": 2, "two": 3})
