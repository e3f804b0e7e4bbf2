"""What a cluster answers and allocates when it is asked by hand, without a worker group."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import ClusterError, PlacementError

SEEN = "SEEN_BY_THE_ACTOR"


class Actor:
    """An ordinary class: no worker, and of no group."""

    def __init__(self, first: int, second: str) -> None:
        self.value = (first, second)
        self.both_are_here = threading.Barrier(2)

    def arguments(self) -> tuple[int, str]:
        return self.value

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return the node that it runs on, and what of Ray's resources it holds."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_assigned_resources()

    def process(self) -> tuple[str, str | None]:
        return sys.executable, os.environ.get(SEEN)

    def meet(self) -> int:
        """Return when it is called twice at a time."""
        return self.both_are_here.wait(30)


@pytest.fixture
def allocate() -> Iterator[Callable[..., Any]]:
    """`Cluster.allocate`, whose actors end with the test."""
    actors: list[Any] = []

    def make(cluster: Cluster, **options: Any) -> Any:
        actors.append(cluster.allocate(Actor, node_rank=0, **options))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


def configured() -> Cluster:
    """Return the cluster of the tests, whose only node has a group of its own and a variable."""
    group = {
        "label": "workshop",
        "node_ranks": "0",
        "env_configs": [{"node_ranks": "0", "env_vars": [{SEEN: "of the group"}]}],
    }
    return Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": [group]}))


def test_a_node_group_is_found_by_its_label(cluster: Cluster) -> None:
    with_groups = configured()
    group = with_groups.get_node_group("workshop")
    assert (group.label, group.node_ranks, group.num_nodes) == ("workshop", (0,), 1)
    assert group.num_units == (with_groups.num_accelerators or 1)
    # These two are in every cluster, the others are those of its configuration.
    assert [cluster.get_node_group(label).node_ranks for label in ("cluster", "node")] == [(0,), (0,)]
    with pytest.raises(PlacementError, match="did you mean `workshop`"):
        with_groups.get_node_group("workshp")
    with pytest.raises(PlacementError, match="workshop"):
        cluster.get_node_group("workshop")


def test_an_actor_is_made_on_its_node_with_its_arguments(cluster: Cluster, allocate: Callable[..., Any]) -> None:
    actor = allocate(cluster, name="by hand", max_concurrency=2, args=(3, "three"))
    assert ray.get(actor.arguments.remote(), timeout=60) == (3, "three")
    node, resources = ray.get(actor.place.remote(), timeout=60)
    assert cluster.node_ranks[node] == 0
    assert not resources
    assert sorted(ray.get([actor.meet.remote(), actor.meet.remote()], timeout=60)) == [0, 1]
    result = ray.get_actor("by hand", namespace=cluster.session.job)
    assert ray.get(result.arguments.remote(), timeout=60) == (3, "three")


def test_actor_has_the_variables_of_its_group(allocate: Callable[..., Any]) -> None:
    plain = allocate(configured(), args=(1, ""))
    with_variables = allocate(configured(), node_group="workshop", args=(1, ""))
    processes = ray.get([plain.process.remote(), with_variables.process.remote()], timeout=60)
    assert processes == [(sys.executable, None), (sys.executable, "of the group")]


def test_no_actor_is_made_on_a_node_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no node 1"):
        cluster.allocate(Actor, node_rank=1, args=(1, ""))
