"""`rlinf inspect memory`: sums of hosts and accelerators, units, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_cli.memory import memory_text
from rlinf_cli.runs.memory_record import NodeMemory, memory_record, node_memory, node_needs
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import ACCELERATOR_LIBRARIES, ProcessForecast
from rlinf_core.placement.strategy import Placement
from rlinf_core.process.proc import Peak

MIB, GIB = 2**20, 2**30
ACTOR = ProcessForecast(
    "actor",
    2,
    {"base": 330 * MIB, "weights": 50 * MIB, "activations": 9000 * MIB, "trajectories": 20 * MIB},
    notes=("a note",),
)
ENV = ProcessForecast("env", 1, {"base": 130 * MIB, "simulators": 20 * GIB})


def placement_of(rank: int, accelerator: int | None) -> Placement:
    """A process on node 0."""
    held = () if accelerator is None else (accelerator,)
    return Placement(
        rank=rank,
        world_size=2,
        cluster_node_rank=0,
        placement_node_rank=0,
        local_rank=rank,
        local_world_size=2,
        local_accelerator_rank=accelerator,
        accelerator_type=None,
        visible_accelerators=held,
        visible_device_ids=(),
        isolate_accelerator=True,
        hardware_type="node",
        local_hardware_ranks=held,
        node_group_label="node",
    )


ON_HOST = {"actor": [placement_of(0, None), placement_of(1, None)], "env": [placement_of(0, None)]}
ON_TWO = {"actor": [placement_of(0, 0), placement_of(1, 1)], "env": [placement_of(0, None)]}
ROOMY = NodeMemory(64 * GIB, 80 * GIB)


def record(placements: Any = ON_HOST, node: NodeMemory = ROOMY, peaks: Any = None) -> dict[str, Any]:
    return memory_record((ACTOR, ENV), placements, {0: node}, peaks or {})


def test_parts_on_an_accelerator_are_none_of_the_host() -> None:
    # Weights are loaded on the host.
    host = 2 * (ACCELERATOR_LIBRARIES + (330 + 20 + 50) * MIB) + 130 * MIB + 20 * GIB
    assert node_needs((ACTOR, ENV), ON_TWO) == {0: (host, 9050 * MIB)}


def test_components_on_one_accelerator_share_it() -> None:
    shared = {"actor": [placement_of(0, 0), placement_of(1, 0)]}
    assert node_needs((ACTOR,), shared)[0][1] == 2 * 9050 * MIB


def test_components_that_offload_take_turns() -> None:
    rollout = ProcessForecast("rollout", 1, {"weights": 7 * MIB}, offloads=True)
    place = {"actor": [placement_of(0, 0)], "rollout": [placement_of(0, 0)]}
    in_turns = node_needs((ACTOR._replace(offloads=True), rollout), place)
    assert in_turns[0][1] == 9050 * MIB
    assert node_needs((ACTOR, rollout), place)[0][1] == 9057 * MIB


def test_rollouts_that_run_ahead_are_there_beside_the_trainer() -> None:
    rollout = ProcessForecast("rollout", 1, {"weights": 7 * MIB}, offloads=True)
    place = {"actor": [placement_of(0, 0)], "rollout": [placement_of(0, 0)]}
    both = (ACTOR._replace(offloads=True), rollout)
    assert node_needs(both, place, in_turns=False)[0][1] == 9057 * MIB
    assert node_needs(both, place, in_turns=False)[0][0] == node_needs(both, place)[0][0]


def test_without_accelerators_all_is_of_the_host() -> None:
    assert node_needs((ACTOR,), {"actor": [placement_of(0, None)]}) == {0: (9400 * MIB, 0)}


def test_units_follow_the_size() -> None:
    lines = memory_text(record(node=NodeMemory(24 * GIB, None, is_here=True))).splitlines()
    assert lines[0].split() == ["component", "processes", "host", "of", "which"]
    assert "9,400 MiB" in lines[1]
    assert "activations 9,000 MiB, base 330 MiB" in lines[1]
    assert "20.1 GiB" in lines[2]
    override = "(this machine; override: `--available GIB`, or `memory_gib` of a node group)"
    assert f"node 0: 38.5 GiB of 24.0 GiB {override}" in lines
    assert "node 0: 38.5 GiB of 24.0 GiB" in memory_text(record(node=NodeMemory(24 * GIB))).splitlines()


def test_accelerators_have_a_column_and_a_line() -> None:
    lines = memory_text(record(ON_TWO)).splitlines()
    assert lines[0].split()[2:4] == ["host", "accelerator"]
    assert "node 0, its fullest accelerator: 9,050 MiB of 80.0 GiB" in lines
    recorded = record(ON_TWO, NodeMemory(64 * GIB, 8 * GIB))
    (node,) = recorded["nodes"]
    assert (node["accelerator"], node["accelerator_available"], node["fits"]) == (9050 * MIB, 8 * GIB, False)
    assert recorded["components"]["actor"]["on_device"] == ["weights", "activations"]
    assert recorded["components"]["env"]["accelerator"] == 0


def test_keys_that_save_are_named_where_a_host_is_too_small() -> None:
    assert memory_text(record()).splitlines()[-1] == "note: a note"
    assert memory_text(record(node=NodeMemory(24 * GIB))).splitlines()[-2:] == [
        "a node has too little memory; `env` takes the most, 20.1 GiB in its process",
        "  to reduce `simulators` (20.0 GiB): lower `env.train.num_processes`",
    ]


def test_keys_that_save_are_those_of_the_accelerator() -> None:
    small = memory_text(record(ON_TWO, NodeMemory(64 * GIB, 8 * GIB))).splitlines()
    assert small[-2:] == [
        "an accelerator has too little memory; `actor` takes the most, 9,050 MiB in each of 2 processes",
        "  to reduce `activations` (9,000 MiB): lower `micro_batch_size` or `max_tokens_per_micro_batch`, or set"
        " `gradient_checkpointing: true`",
    ]


TWO_GROUPS = """
cluster:
  num_nodes: 3
  node_groups:
    - {label: train, node_ranks: 0-1, memory_gib: 512, accelerators: {per_node: 8, memory_gib: 80}}
    - {label: small, node_ranks: 1, memory_gib: 64}
"""


def test_nodes_have_what_the_file_declares() -> None:
    cluster = load_job("-", stdin=TWO_GROUPS.encode()).cluster
    assert cluster is not None
    here = 24 * GIB
    declared = [node_memory(cluster, rank, available=None, here=here) for rank in range(3)]
    # Of groups that share a node the least counts.
    assert declared == [
        NodeMemory(512 * GIB, 80 * GIB),
        NodeMemory(64 * GIB, 80 * GIB),
        NodeMemory(here, None, is_here=True),
    ]
    assert node_memory(cluster, 1, available=16, here=here).host == 16 * GIB
    assert node_memory(cluster, 2, available=None, here=None) == NodeMemory()


@pytest.mark.parametrize(
    ("has", "fits"),
    [
        (NodeMemory(), True),
        (NodeMemory(40 * GIB, 9 * GIB), True),
        (NodeMemory(20 * GIB, 9 * GIB), False),
        (NodeMemory(40 * GIB, 8 * GIB), False),
        (NodeMemory(None, 8 * GIB), False),
    ],
)
def test_a_job_fits_where_every_node_has_enough(has: NodeMemory, fits: bool) -> None:
    assert record(ON_TWO, has)["fits"] is fits


def test_peaks_of_a_run_stand_beside_the_forecast() -> None:
    peaks = {("actor", 0): {"run_training": Peak(9300 * MIB, 7)}, ("actor", 1): {"run_training": Peak(9350 * MIB)}}
    measured = record(peaks=peaks)
    actor, env = measured["components"]["actor"], measured["components"]["env"]
    assert (actor["host_measured"], actor["accelerator_measured"]) == (9350 * MIB, 7)
    assert (env["host_measured"], env["accelerator_measured"]) == (None, None)
    lines = memory_text(measured).splitlines()
    assert "host measured" in lines[0]
    assert "9,350 MiB" in lines[1]
    assert lines[2].split("20.1 GiB")[1].split()[0] == "-"
