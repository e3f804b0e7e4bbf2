"""Machines of a cluster: joining, seats, and which can be reached."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.cluster import joining, ray_process
from rlinf_core.cluster import joining as module
from rlinf_core.cluster.engine import RayEngine
from rlinf_core.cluster.joining import answer, join
from rlinf_core.cluster.membership import (
    NodeMember,
    Seats,
    check_hardware,
    departed,
    free_port,
    stand_in,
    take_seats,
)
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, EnvironmentVariableError
from rlinf_core.topology import NodeInfo

NODE = NodeMember("id", "10.0.0.3", 2)


def entry(rank: int, alive: bool, reason: str = "") -> dict[str, Any]:
    labels = {"rlinf.io/rank": str(rank)}
    return {
        "NodeID": f"{rank}{alive}",
        "NodeManagerAddress": f"10.0.0.{rank + 1}",
        "Alive": alive,
        "Labels": labels,
        "DeathReasonMessage": reason,
    }


def test_ranks_that_are_gone_are_told_with_the_reason() -> None:
    nodes = [entry(0, True), entry(1, False), entry(1, True), entry(2, False, "missed heartbeats\nand more")]
    assert departed(nodes) == {2: "node 2 (10.0.0.3) joined and was lost: missed heartbeats"}


# What a function says on a node when it is asked; `RLINF_NODE_RANK` is read there.
SAID = {"cause": EnvironmentVariableError("RLINF_NODE_RANK", "one", expected="an integer", help="Its rank.")}


@pytest.mark.parametrize(
    ("error", "message", "help"),
    [
        ("cause", r"the node at 10\.0\.0\.3: `RLINF_NODE_RANK` is `one`, expected an integer", "Its rank."),
        ("GetTimeoutError", "the node at 10.0.0.3 has not answered since ", "rlinf status"),
        ("NodeDiedError", "the node at 10.0.0.3 has not answered since ", "rlinf status"),
        ("RayTaskError", "the node at 10.0.0.3 joined, but cannot run rlinf", "install the same rlinf"),
    ],
)
def test_the_remedy_fits_the_cause(monkeypatch: pytest.MonkeyPatch, error: str, message: str, help: str) -> None:
    base = type("RayError", (Exception,), {})
    names = ("RayTaskError", "RuntimeEnvSetupError", "WorkerCrashedError", "GetTimeoutError", "NodeDiedError")
    types = {name: type(name, (base,), {}) for name in names}

    def get(reference: Any, timeout: float) -> None:
        failure = types["RayTaskError" if error in SAID else error]("No module named 'rlinf_core'")
        vars(failure).update({"cause": SAID[error]} if error in SAID else {})
        raise failure

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=base, **types))
    monkeypatch.setattr(module, "ray_api", lambda: ray)
    with pytest.raises(ClusterError, match=message) as caught:
        answer(None, NODE, 1.8e9)
    assert help in (caught.value.help or "")


@pytest.mark.parametrize("seconds", [20, 90, 600])
def test_a_busy_node_is_waited_for_and_a_lost_one_is_told(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    class RayError(Exception):
        pass

    def get(reference: str, timeout: float) -> str:
        if seconds > timeout:
            raise TimeoutError
        return reference

    errors = SimpleNamespace(RayError=RayError, RayTaskError=KeyError, RuntimeEnvSetupError=KeyError)
    errors.WorkerCrashedError = KeyError
    monkeypatch.setattr(module, "ray_api", lambda: SimpleNamespace(get=get, exceptions=errors))
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "10")
    if seconds < 100:
        assert answer("facts", NodeMember("id", "10.0.0.2"), 0.0) == "facts"
    else:
        with pytest.raises(ClusterError, match=r"the node at 10\.0\.0\.2 has not answered since"):
            answer("facts", NodeMember("id", "10.0.0.2"), 0.0)


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
    monkeypatch.setattr(joining, "answer", lambda *_: (NodeInfo(0), None))
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


@pytest.mark.parametrize("text", ["auto", "10.0.0.1", ":6379", "head:", "ray://head:x", "127.0.0.1:99999", "head:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ClusterError, match=f"`{text}` is not the address") as caught:
        ray_process.check(text)
    assert "HOST:PORT" in str(caught.value.help)


def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"the cluster at {address} does not answer") as caught:
        ray_process.check(address)
    assert caught.value.why == "Connection refused"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "sent nothing within 0.2 s"),
        (b"", "or closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak gRPC"),
    ],
)
def test_where_something_else_than_a_head_listens(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "0.2" if answer is None else "60")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    # Until the other side has given up.
                    while connection.recv(64):
                        pass
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"the cluster at {address} does not answer") as caught:
            ray_process.check(address)
        thread.join()
    assert str(caught.value.why).startswith("the listener there is not a Ray head: it ")
    assert why in str(caught.value.why)


# Node 0 trains, 1 and 2 simulate, 3 renders; 4 and 5 are spares of the simulating ones, 6 of the rendering one.
CLUSTER = ClusterConfig.model_validate(
    {
        "num_nodes": 7,
        "spare_nodes": 3,
        "node_groups": [
            {"label": "train", "node_ranks": "0"},
            {"label": "sim", "node_ranks": "1-2,4-5"},
            {"label": "render", "node_ranks": "3,6"},
        ],
    }
)


def living(*ranks: int) -> list[NodeMember]:
    return [NodeMember(f"id{rank}", f"10.0.0.{rank + 1}", rank) for rank in ranks]


def served(*ranks: int, lost: tuple[int, ...] = (), late: bool = False) -> list[str] | None:
    """Return Ray's ids of the nodes by rank, with those of `ranks` alive."""
    seats = take_seats(CLUSTER, living(*ranks), dict.fromkeys(lost, "lost"), late=late)
    return None if seats is None else [member.ray_id for member in seats.members]


def test_spares_are_idle_while_no_node_is_lost() -> None:
    assert served(0, 1, 2, 3, 4, 5, 6) == ["id0", "id1", "id2", "id3"]
    # Nor are they waited for.
    assert served(0, 1, 2, 3) == ["id0", "id1", "id2", "id3"]


def test_the_lowest_spare_of_the_same_groups_serves() -> None:
    assert served(0, 1, 3, 4, 5, 6, lost=(2,)) == ["id0", "id1", "id4", "id3"]
    assert served(0, 1, 3, 5, 6, lost=(2, 4)) == ["id0", "id1", "id5", "id3"]
    assert served(0, 4, 5, 6, lost=(1, 2, 3)) == ["id0", "id4", "id5", "id6"]


def test_a_loss_without_a_fitting_spare_is_waited_for() -> None:
    assert served(0, 1, 2, 4, 5, lost=(3, 6)) is None
    assert served(1, 2, 3, 4, 5, 6, lost=(0,)) is None


def test_a_node_that_never_joined_is_replaced_when_it_is_late() -> None:
    assert served(0, 1, 3, 4, 5, 6) is None
    assert served(0, 1, 3, 4, 5, 6, late=True) == ["id0", "id1", "id4", "id3"]


def test_nodes_without_ranks_have_no_spares() -> None:
    joined = [*living(0, 1, 3, 4), NodeMember("x", "10.0.0.9")]
    assert take_seats(CLUSTER, joined, {2: "lost"}, late=True) is None


def test_change_names_both_nodes_and_the_reason() -> None:
    seats = take_seats(CLUSTER, living(0, 1, 3, 4), {2: "node 2 (10.0.0.3) joined and was lost: no heartbeats"})
    assert seats is not None
    assert [seats.own_rank(rank) for rank in range(4)] == [0, 1, 4, 3]
    (change,) = seats.changes
    assert change == (
        2,
        "node 4 (10.0.0.5), a spare, serves as node 2",
        "node 2 (10.0.0.3) joined and was lost: no heartbeats",
    )


def test_spare_with_other_accelerators_is_refused() -> None:
    seats = Seats(tuple(living(0, 1, 4, 3)), {2: 4})
    nodes = [member.info(rank)._replace(num_accelerators=8) for rank, member in enumerate(seats.members)]
    check_hardware(CLUSTER, seats, nodes)
    nodes[2] = nodes[2]._replace(num_accelerators=4)
    with pytest.raises(ClusterError, match="node 4 cannot serve as node 2") as caught:
        check_hardware(CLUSTER, seats, nodes)
    assert caught.value.why == "it has 4 accelerators, node 1 of the same groups 8 accelerators"


ELASTIC = ClusterConfig.model_validate(
    {
        "num_nodes": 5,
        "spare_nodes": 1,
        "node_groups": [
            {"label": "train", "node_ranks": "0", "accelerators": {"per_node": 0}},
            {"label": "sim", "node_ranks": "1-4", "accelerators": {"per_node": 2}},
        ],
        "component_placement": {
            "actor": {"node_group": "train", "placement": "0"},
            "critic": {"node_group": "sim", "placement": "4-5"},
            "env": {"node_group": "sim", "placement": "0-3", "elastic": True},
        },
    }
)


def test_elastic_component_does_without_a_node() -> None:
    seats = take_seats(ELASTIC, living(0, 1, 3), {2: "node 2 was lost", 4: "node 4 was lost"})
    assert seats is not None
    assert (seats.absent, seats.replaced) == ({2}, {})
    assert [member.ray_id for member in seats.members] == ["id0", "id1", "", "id3"]
    assert [change.text for change in seats.changes] == ["`env` goes on without node 2"]


def test_the_spare_serves_where_no_other_can() -> None:
    seats = take_seats(ELASTIC, living(0, 2, 4), {1: "lost", 3: "lost"})
    assert seats is not None
    # The critic, on node 3, is not elastic.
    assert (seats.absent, seats.replaced) == ({1}, {3: 4})


def test_a_node_that_an_inelastic_component_needs_is_waited_for() -> None:
    assert take_seats(ELASTIC, living(0, 1, 2), {3: "lost", 4: "lost"}) is None
    assert take_seats(ELASTIC, living(0, 3), {1: "lost", 2: "lost", 4: "lost"}) is None


def test_stand_in_has_what_the_file_declares_or_a_peer_has() -> None:
    nodes = [member.info(rank)._replace(num_accelerators=4) for rank, member in enumerate(living(0, 1, 2, 3))]
    assert stand_in(ELASTIC, 2, nodes, [2]).num_accelerators == 2
    assert stand_in(CLUSTER, 2, nodes, [2]).num_accelerators == 4
    assert stand_in(CLUSTER, 3, nodes, [3]).num_accelerators == 0


def test_free_ports_are_none_that_clients_are_given() -> None:
    ports = [free_port() for _ in range(20)]
    assert max(ports) < 32768
    assert len(set(ports)) > 1
