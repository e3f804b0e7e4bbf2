"""`rlinf inspect memory RUN`: the processes are where the run had them, and nothing has to be assumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.runs.documents import RecordedPlace, recorded_places
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.conftest import Cli

# Of accelerators that the file does not declare.
ON_UNKNOWN_GPUS = """
extends: math_laptop
cluster:
  num_nodes: 2
  component_placement:
    actor,rollout,reward: {node_group: cluster, placement: 0-3}
"""


def placed(kind: str, places: list[tuple[int, int | None]]) -> dict[str, Any]:
    return {
        "processes": [
            {
                "rank": rank,
                "node_rank": node,
                "node_group": "cluster",
                "hardware_type": kind,
                "local_hardware_ranks": [] if unit is None else [unit],
            }
            for rank, (node, unit) in enumerate(places)
        ]
    }


COMPONENTS = {
    "actor": placed("NVIDIA", [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "rollout": placed("NVIDIA", [(0, 2), (1, 2)]),
    "reward": placed("node", [(0, None)]),
}


def test_places_are_read_from_the_run(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    assert recorded_places(file) == {}
    file.write_text(json.dumps({"components": COMPONENTS}))
    assert recorded_places(file)["rollout"] == [RecordedPlace(0, (2,)), RecordedPlace(1, (2,))]
    assert recorded_places(file)["reward"] == [RecordedPlace(0)]
    file.write_text('{"components": {"actor": {"processes": [{"rank": "0"}]}}}')
    with pytest.raises(RunError, match="has an invalid value"):
        recorded_places(file)


def test_a_run_needs_no_assumption(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ON_UNKNOWN_GPUS)
    assert "--assume 8" in cli.fails(2, "inspect", "memory", file)
    run = RunFolder.create(RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path)}}), "math")
    run.write_config_text(ON_UNKNOWN_GPUS)
    (run.path / "placement.json").write_text(json.dumps({"components": COMPONENTS}))
    ended = cli("inspect", "memory", run.path, "--available", "64", "--json")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out)
    assert {name: part["processes"] for name, part in record["components"].items()} == {
        "actor": 4,
        "rollout": 2,
        "reward": 1,
    }
    assert [node["node_rank"] for node in record["nodes"]] == [0, 1]
    assert record["components"]["actor"]["accelerator"] > 0
