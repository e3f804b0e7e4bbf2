"""The node that serves under each rank: its own, else a spare of the same groups, else nobody."""

from __future__ import annotations

import pytest

from rlinf_core.cluster.membership import NodeMember, node_info
from rlinf_core.cluster.seats import Seats, check_hardware, stand_in, take_seats
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import ClusterError

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
    nodes = [node_info(rank, member)._replace(num_accelerators=8) for rank, member in enumerate(seats.members)]
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
    nodes = [node_info(rank, member)._replace(num_accelerators=4) for rank, member in enumerate(living(0, 1, 2, 3))]
    assert stand_in(ELASTIC, 2, nodes, [2]).num_accelerators == 2
    assert stand_in(CLUSTER, 2, nodes, [2]).num_accelerators == 4
    assert stand_in(CLUSTER, 3, nodes, [3]).num_accelerators == 0
