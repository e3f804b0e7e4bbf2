"""Predicted against measured steps over three hosts, one with slower accelerators; all are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest

from tests.cluster import ray_hosts
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import RayHosts
from tests.golden.command_line import REPOSITORY
from tests.integration.advice.test_predictions import EMBODIED, MOST_OFF, STAND_INS, TIE, WORK

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
        """Run the job; return its folder, and the mean of its steps but for the first ones and the last."""
        runs = self.folder / "runs"
        logger = [f"runner.logger.log_path={runs}", f"runner.logger.experiment_name={name}"]
        self.rlinf("train", str(self.job), *words, *logger)
        (run,) = runs.glob(f"{name}-2*")
        steps: list[float] = [json.loads(line)["metrics"]["time/step"] for line in (run / "metrics.jsonl").open()]
        return str(run), mean(steps[2:-1])


@pytest.fixture(scope="module")
def three(hosts: Hosts) -> Iterator[Three]:
    made = Three(hosts)
    try:
        yield made
    finally:
        made.ray.end()


def words_of(placement: tuple[str, str, str, int, int]) -> list[str]:
    *places, stages, ahead = placement
    words = [f"runner.max_staleness={ahead}", f"rollout.pipeline_stage_num={stages}"]
    for name, place in zip(("env", "rollout", "actor"), places, strict=True):
        group, ranks = str(place).split()
        words.append(f"cluster.component_placement.{name}={json.dumps({'node_group': group, 'placement': ranks})}")
    return words


def test_steps_on_unlike_hosts_are_predicted(three: Three) -> None:
    words = [words_of(placement) for placement in PLACEMENTS]
    runs, seconds = zip(*(three.measured(f"p{at}", words[at]) for at in range(len(words))), strict=True)
    asked = ["inspect", "placement", str(three.job), "--advise", ",".join(runs[:FITTED]), "--json"]
    predicted = [json.loads(three.rlinf(*asked, *placed))["now"]["seconds"] for placed in words]
    table = [
        f"{' / '.join(map(str, placement[:3]))}, stages {placement[3]}, staleness {placement[4]}: "
        f"{p:.2f} predicted, {m:.2f} measured, {p / m - 1:+.1%}"
        for placement, p, m in zip(PLACEMENTS, predicted, seconds, strict=True)
    ]
    print("\n".join(table))
    assert all(abs(p / m - 1) <= MOST_OFF for p, m in zip(predicted, seconds, strict=True)), table
    pairs = [(a, b) for a in range(len(words)) for b in range(len(words)) if seconds[a] < seconds[b] * (1 - TIE)]
    assert all(predicted[a] < predicted[b] * (1 + TIE) for a, b in pairs), table
