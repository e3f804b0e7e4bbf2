"""`rlinf inspect memory`: sums of hosts and accelerators, units, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_cli.memory.memory_sums import NodeMemory, NodeNeed, accelerated, fit, node_memory, sums
from rlinf_cli.render.memory_table import MemoryView, memory_record, memory_text
from rlinf_core.job.load import load_job
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast
from rlinf_core.placement.placement import Placement
from rlinf_core.process.process_memory import Peak

MIB = 2**20
ACTOR = ProcessForecast(
    "actor",
    2,
    (
        PhaseForecast("init_worker", {"base": 300 * MIB, "weights": 100 * MIB}, frozenset({"weights"})),
        PhaseForecast(
            "run_training", {"base": 330 * MIB, "weights": 50 * MIB, "activations": 9000 * MIB}, frozenset({"weights"})
        ),
    ),
    notes=("a note",),
)
ENV = ProcessForecast("env", 1, (PhaseForecast("interact", {"base": 130 * MIB, "simulators": 20 * 1024 * MIB}),))


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


def view(**changes: Any) -> MemoryView:
    found = MemoryView(
        forecasts=(ACTOR, ENV),
        accelerated=(),
        peaks={},
        needs={0: NodeNeed(30 * 1024 * MIB)},
        nodes={0: NodeMemory(24 * 1024 * MIB, is_here=True)},
        fits=False,
        change=None,
    )
    return found._replace(**changes)


def test_parts_on_an_accelerator_are_none_of_the_host() -> None:
    placements = {"actor": [placement_of(0, 0), placement_of(1, 1)], "env": [placement_of(0, None)]}
    assert set(accelerated(placements)) == {"actor"}
    assert sums((ACTOR, ENV), placements) == {0: NodeNeed((2 * (330 + 9000) + 130 + 20 * 1024) * MIB, 100 * MIB)}


def test_components_on_one_accelerator_share_it() -> None:
    both = {"actor": [placement_of(0, 0), placement_of(1, 0)], "env": [placement_of(0, None)]}
    assert sums((ACTOR, ENV), both)[0].accelerator == 200 * MIB


def test_without_accelerators_all_is_of_the_host() -> None:
    assert sums((ACTOR,), {"actor": [placement_of(0, None)]}) == {0: NodeNeed(9380 * MIB)}


def test_units_follow_the_size() -> None:
    lines = memory_text(view()).splitlines()
    assert "9,380 MiB" in lines[2]
    assert "activations 9,000 MiB" in lines[2]
    assert "20.1 GiB" in lines[3]
    assert (
        "node 0: 30.0 GiB of 24.0 GiB, this machine's memory; for others set `memory_gib` of the node group or"
        " `--available GIB`" in lines
    )
    declared = memory_text(view(nodes={0: NodeMemory(24 * 1024 * MIB)})).splitlines()
    assert "node 0: 30.0 GiB of 24.0 GiB" in declared


def test_accelerators_have_a_line_of_their_own() -> None:
    on_device = view(accelerated=("actor",), needs={0: NodeNeed(30 * 1024 * MIB, 100 * MIB)})
    assert "node 0, its fullest accelerator: 100 MiB: weights" in memory_text(on_device).splitlines()
    declared = on_device._replace(nodes={0: NodeMemory(24 * 1024 * MIB, 80 * MIB)})
    assert "node 0, its fullest accelerator: 100 MiB of 80 MiB: weights" in memory_text(declared).splitlines()
    record = memory_record(declared)
    assert record["nodes"] == [
        {
            "node_rank": 0,
            "forecast": 30 * 1024 * MIB,
            "available": 24 * 1024 * MIB,
            "accelerator": 100 * MIB,
            "accelerator_available": 80 * MIB,
            "fits": False,
        }
    ]
    assert [each["accelerated"] for each in record["components"].values()] == [True, False]


@pytest.mark.parametrize(
    ("change", "last"),
    [
        (("a.b=1", "c.d=2"), "fits with: a.b=1 c.d=2"),
        (
            None,
            "a node does not have enough memory, and no known change of the file fits; the largest part is"
            " `simulators`, 20.0 GiB in the process of `env`",
        ),
    ],
)
def test_what_would_fit_or_what_there_is_most_of_comes_last(change: tuple[str, ...] | None, last: str) -> None:
    assert memory_text(view(change=change)).splitlines()[-1] == last
    assert memory_text(view(change=change, fits=True)).splitlines()[-1] == "note: a note"


def test_fullest_part_is_named_where_an_accelerator_is_too_small() -> None:
    small = view(
        accelerated=("actor",),
        needs={0: NodeNeed(30 * 1024 * MIB, 100 * MIB)},
        nodes={0: NodeMemory(64 * 1024 * MIB, 80 * MIB)},
    )
    assert memory_text(small).splitlines()[-1] == (
        "an accelerator does not have enough memory, and no known change of the file fits; the largest part is"
        " `weights`, 100 MiB in each of 2 processes of `actor`"
    )


TWO_GROUPS = """
cluster:
  num_nodes: 3
  node_groups:
    - {label: train, node_ranks: 0-1, memory_gib: 512, accelerators: {per_node: 8, memory_gib: 80}}
    - {label: small, node_ranks: 1, memory_gib: 64}
"""


def test_node_has_the_least_that_its_groups_declare() -> None:
    cluster = load_job("-", stdin=TWO_GROUPS.encode()).cluster
    assert cluster is not None
    here = 24 * 2**30
    assert node_memory(cluster, range(3), host_gib=None, here=here) == {
        0: NodeMemory(512 * 2**30, 80 * 2**30),
        1: NodeMemory(64 * 2**30, 80 * 2**30),
        2: NodeMemory(here, None, is_here=True),
    }
    given = node_memory(cluster, range(3), host_gib=16, here=here)
    assert {each.host for each in given.values()} == {16 * 2**30}
    assert node_memory(cluster, [2], host_gib=None, here=None) == {2: NodeMemory()}


@pytest.mark.parametrize(
    ("has", "fits"),
    [
        (NodeMemory(), True),
        (NodeMemory(10, 5), True),
        (NodeMemory(9, 5), False),
        (NodeMemory(10, 4), False),
        (NodeMemory(None, 4), False),
    ],
)
def test_a_job_fits_where_every_node_has_enough(has: NodeMemory, fits: bool) -> None:
    assert fit({0: NodeNeed(1), 1: NodeNeed(10, 5)}, {0: NodeMemory(), 1: has}) is fits


def test_peaks_of_a_run_stand_beside_the_forecast() -> None:
    peaks = {("actor", 0): {"run_training": Peak(9300 * MIB)}, ("actor", 1): {"run_training": Peak(9350 * MIB)}}
    lines = memory_text(view(peaks=peaks)).splitlines()
    assert "measured" in lines[0]
    assert "9,350 MiB" in lines[2]
    assert lines[1].split("400 MiB")[1].split()[0] == "-"
