"""The dashboard of Grafana asks for the gauges that a run serves to Prometheus, and for no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest

from rlinf_core.runners import events
from rlinf_core.runners.exporters import BackendSettings, PrometheusExporter

ROOT: Final = Path(__file__).parents[3]
DASHBOARD: Final = ROOT / "docs" / "grafana" / "rlinf.json"
PHASES: Final = (
    events.SYNC_WEIGHTS,
    events.GENERATE_ROLLOUTS,
    events.ADVANTAGES,
    events.ACTOR_TRAINING,
    events.EVALUATE,
)
# What depends on the machine is not in the good runs. The nightly run with a real Prometheus serves them.
MEASURED: Final = (
    *("time/step", "speed/env_steps_per_second", "speed/samples_per_second", "speed/learner_idle", "speed/env_idle"),
    *("memory/actor_gib", "memory/actor_accelerator_gib", "rollout/tokens_per_second"),
)


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def asked() -> set[str]:
    text = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    return set(re.findall(r"rlinf_\w+", text))


def recorded() -> Iterator[str]:
    for path in sorted((ROOT / "tests" / "data" / "good_runs").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield from json.loads(line)["metrics"]


@pytest.fixture
def served(tmp_path: Path) -> set[str]:
    exporter = PrometheusExporter(BackendSettings(tmp_path, "rlinf", "run", {}), 0)
    names = {*recorded(), *(f"time/{phase}" for phase in PHASES), *MEASURED}
    exporter.log(1, dict.fromkeys(names, 1.0))
    with urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    exporter.close()
    return set(re.findall(r"^(rlinf_\w+)\{", text, re.MULTILINE))


def test_every_gauge_of_the_dashboard_is_served(served: set[str]) -> None:
    assert len(asked()) > 20
    assert asked() - served == set()


def test_panels_have_distinct_ids_and_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (place["x"] + column, place["y"] + row)
        for place in places
        for column in range(place["w"])
        for row in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_query_is_of_the_chosen_runs() -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert len(re.findall(r'rlinf_\w+\{run=~"\$run"\}', target["expr"])) == 1, target
