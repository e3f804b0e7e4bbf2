"""Predicted against measured steps over three hosts, one with slower accelerators; all are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import ray_hosts
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import RayHosts
from tests.golden.command_line import REPOSITORY
from tests.integration.advice.test_predictions import (
    EMBODIED,
    STAND_INS,
    WORK,
    check_predictions,
    overrides_of,
    recorded_as,
    step_of,
)

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(3600)]

NAMES = ("trainer0", "trainer1", "render0")
# Those of the last host take twice as long.
SLOWER = 2.0
GROUPS = """
  num_nodes: 3
  node_groups:
    - {label: fast, node_ranks: 0-1, accelerators: {model: STAND, per_node: 2}}
    - {label: slow, node_ranks: 2, accelerators: {model: STAND-SLOW, per_node: 2}}
  component_placement:
    "actor,rollout,env": {node_group: fast, placement: 0}
"""
# Environments, policy, and training; stages, and staleness. Advice is fitted to the runs of the first four.
PLACEMENTS = [
    ("fast 0", "fast 0", "fast 0", 1, 0),
    ("fast 0-1", "fast 0-1", "fast 0-1", 1, 0),
    ("slow 0", "slow 0", "fast 0", 1, 0),
    ("fast 0", "fast 1", "slow 0", 1, 0),
    ("fast 0-3", "fast 0-3", "fast 0-3", 1, 0),
    ("fast 0", "fast 1", "fast 0-1", 2, 0),
    ("fast 0-1", "fast 2", "fast 3", 2, 1),
    ("fast 0", "fast 0", "fast 1", 1, 1),
    ("fast 0", "fast 2", "fast 3", 2, 0),
    ("slow 0-1", "fast 0-1", "fast 2-3", 2, 1),
    ("fast 0", "fast 1", "slow 0-1", 2, 1),
    ("slow 0-1", "slow 0-1", "fast 0-3", 1, 1),
]
FITTED = 4


class Three:
    """Three hosts with two stand-in accelerators each, and jobs on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.ray = RayHosts(hosts.folder / "ray-with-stand-ins", *(hosts[name] for name in NAMES))
        self.folder = self.ray.folder
        before = EMBODIED.partition("cluster:")[0], EMBODIED[EMBODIED.index("\nenv:") :]
        self.job = self.folder / "job.yaml"
        self.job.write_text(f"{before[0]}cluster:{GROUPS}{before[1]}")
        for rank, host in enumerate(self.ray.hosts):
            host.sh("mkdir /tmp/accelerators")
            self.ray.begin(host, env={**self.environment(rank), "RLINF_NODE_RANK": str(rank)})
            if not rank:
                self.ray.wait_for_head()

    def environment(self, rank: int) -> dict[str, str]:
        factor = SLOWER if rank == 2 else 1.0
        work: dict[str, Any] = {
            part: {key: value * factor for key, value in line.items()} if isinstance(line, dict) else line
            for part, line in WORK.items()
        }
        return {
            "PYTHONPATH": f"{STAND_INS}:{REPOSITORY}",
            "STAND_IN_WORK": json.dumps(work),
            "STAND_IN_DEVICES": "2",
            "STAND_IN_MODEL": "STAND-SLOW" if rank == 2 else "STAND",
            "STAND_IN_LOCKS": "/tmp/accelerators",
        }

    def rlinf(self, *words: str) -> str:
        env = {**self.environment(0), **self.ray.environment, "RLINF_ADDRESS": self.ray.address, "RLINF_REPORT": "0"}
        command = [sys.executable, "-m", "rlinf_cli", *words]
        ended = self.ray.hosts[0].run(ray_hosts.with_env(env, command), check=False, timeout=900)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return ended.stdout

    def measured(self, name: str, words: list[str]) -> tuple[str, float]:
        """Run the job; see `step_of`."""
        runs = self.folder / "runs"
        self.rlinf("train", str(self.job), *words, *recorded_as(runs, name))
        return step_of(runs, name)


@pytest.fixture(scope="module")
def three(hosts: Hosts) -> Iterator[Three]:
    made = Three(hosts)
    try:
        yield made
    finally:
        made.ray.end()


def words_of(placement: tuple[str, str, str, int, int]) -> list[str]:
    *places, stages, ahead = placement
    parts = zip(("env", "rollout", "actor"), map(str.split, map(str, places)), strict=True)
    return overrides_of(
        {name: {"node_group": group, "placement": ranks} for name, (group, ranks) in parts}, stages, ahead
    )


def test_steps_on_unlike_hosts_are_predicted(three: Three) -> None:
    words = [words_of(placement) for placement in PLACEMENTS]
    runs, seconds = zip(*(three.measured(f"p{at}", words[at]) for at in range(len(words))), strict=True)
    asked = ["inspect", "placement", str(three.job), "--advise", ",".join(runs[:FITTED]), "--json"]
    predicted = [json.loads(three.rlinf(*asked, *placed))["now"]["seconds"] for placed in words]
    check_predictions(predicted, seconds, list(map(str, PLACEMENTS)))
