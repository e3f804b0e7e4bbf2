"""`rlinf inspect memory`: sums of hosts and accelerators, units, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.training.memory import PhaseForecast, ProcessForecast
from rlinf_cli.memory_sums import accelerated, sums
from rlinf_cli.render.memory import MemoryView, memory_record, memory_text
from rlinf_core.memory import Peak
from rlinf_core.placement.placement import Placement

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
        nodes={0: 30 * 1024 * MIB},
        devices={},
        available=24 * 1024 * MIB,
        is_here=True,
        fits=False,
        change=None,
    )
    return found._replace(**changes)


def test_parts_on_an_accelerator_are_none_of_the_host() -> None:
    placements = {"actor": [placement_of(0, 0), placement_of(1, 1)], "env": [placement_of(0, None)]}
    assert set(accelerated(placements)) == {"actor"}
    hosts, devices = sums((ACTOR, ENV), placements)
    assert hosts == {0: (2 * (330 + 9000) + 130 + 20 * 1024) * MIB}
    assert devices == {0: 100 * MIB}


def test_components_on_one_accelerator_share_it() -> None:
    both = {"actor": [placement_of(0, 0), placement_of(1, 0)], "env": [placement_of(0, None)]}
    assert sums((ACTOR, ENV), both)[1] == {0: 200 * MIB}


def test_without_accelerators_all_is_of_the_host() -> None:
    hosts, devices = sums((ACTOR,), {"actor": [placement_of(0, None)]})
    assert (hosts, devices) == ({0: 9380 * MIB}, {})


def test_units_follow_the_size() -> None:
    lines = memory_text(view()).splitlines()
    assert "9,380 MiB" in lines[2]
    assert "activations 9,000 MiB" in lines[2]
    assert "20.1 GiB" in lines[3]
    assert "node 0: 30.0 GiB of 24.0 GiB, the memory of this machine; `--available GIB` says that of another" in lines
    assert "node 0: 30.0 GiB of 24.0 GiB" in memory_text(view(is_here=False)).splitlines()


def test_accelerators_have_a_line_of_their_own() -> None:
    text = memory_text(view(accelerated=("actor",), devices={0: 100 * MIB}))
    assert "node 0, its fullest accelerator: 100 MiB of weights" in text.splitlines()
    record = memory_record(view(accelerated=("actor",), devices={0: 100 * MIB}))
    assert record["nodes"] == [{"node_rank": 0, "forecast": 30 * 1024 * MIB, "accelerator": 100 * MIB}]
    assert [each["accelerated"] for each in record["components"].values()] == [True, False]


@pytest.mark.parametrize(
    ("change", "last"),
    [
        (("a.b=1", "c.d=2"), "it would fit with: a.b=1 c.d=2"),
        (
            None,
            "it does not fit, and no smaller batch or number of environments is known that would;"
            " most of it is `simulators`: 20.0 GiB in the process of `env`",
        ),
    ],
)
def test_what_would_fit_or_what_there_is_most_of_comes_last(change: tuple[str, ...] | None, last: str) -> None:
    assert memory_text(view(change=change)).splitlines()[-1] == last
    assert memory_text(view(change=change, fits=True)).splitlines()[-1] == "note: a note"


def test_peaks_of_a_run_stand_beside_the_forecast() -> None:
    peaks = {("actor", 0): {"run_training": Peak(9300 * MIB)}, ("actor", 1): {"run_training": Peak(9350 * MIB)}}
    lines = memory_text(view(peaks=peaks)).splitlines()
    assert "measured" in lines[0]
    assert "9,350 MiB" in lines[2]
    assert lines[1].split("400 MiB")[1].split()[0] == "-"
