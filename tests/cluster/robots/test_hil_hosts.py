"""The shipped `franka_hil` on three machines: two robots' PCs without torch, and the learner with the buffer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipes.embodied.replay.segments import read_segments
from tests.cluster import without_torch
from tests.cluster.hosts import Hosts
from tests.every_third import steered
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

LEARNER, PCS = "trainer0", ("render0", "robot0")
# Both arms have the same address, each on a network of its own; a host's /tmp is its own, too.
ARM, RECORDING = "127.0.0.9", "/tmp/recording"
EPISODE, STEPS = 15, 4
FILE = """\
extends: {base}
cluster:
  num_nodes: 3
  ports: 24000-24199
  node_groups:
    - {{label: learner, node_ranks: 0, hosts: trainer0}}
    - label: arms
      node_ranks: 1-2
      hosts: [render0, robot0]
      hardware:
        type: Franka
        configs:
          - {{node_rank: 1, robot_ip: $ROBOT_IP}}
          - {{node_rank: 2, robot_ip: $ROBOT_IP}}
      env_configs:
        - {{node_ranks: 1-2, python_interpreter_path: {no_torch}, env_vars: [{{ROBOT_IP: {arm}}}]}}
data: {{train_data_paths: null}}
env:
  train:
    intervention: {{source: "tests.cluster.without_torch:WithoutTorch"}}
    max_episode_steps: {episode}
    max_steps_per_rollout_epoch: {episode}
actor: {{global_batch_size: 32, model: {{hidden_dim: 32}}}}
algorithm: {{learning_starts: 60, replay: {{recording_path: {recording}}}}}
runner: {{max_steps: {steps}, val_check_interval: -1, save_interval: {steps}, logger: {{log_path: {runs}}}}}
"""


@pytest.fixture
def arms(hosts: Hosts) -> Iterator[None]:
    """Controllers of an arm beside each robot's PC, which only that PC reaches."""
    words = [
        sys.executable,
        "-m",
        "recipes.embodied.robots.controller.simulated_controller",
        "--host",
        ARM,
        "--speed",
        "20",
    ]
    started = [hosts[name].spawn(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for name in PCS]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on ")
        yield
    finally:
        for name, process in zip(PCS, started, strict=True):
            # Past the command that entered the host for it.
            for pid, command in hosts[name].processes().items():
                if "simulated_controller" in command:
                    hosts[name].run(["kill", str(pid)], check=False)
            process.communicate(timeout=60)


class Site:
    """The cluster of `FILE`, from the control host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "hil"
        self.folder.mkdir()
        self.no_torch = hosts.interpreter(without_torch.NAME, first_line=without_torch.FIRST_LINE)
        self.file = self.folder / "hil.yaml"
        base = Path(__file__).parents[3] / "configs" / "franka_hil.yaml"
        self.file.write_text(
            FILE.format(
                base=base,
                no_torch=self.no_torch,
                arm=ARM,
                episode=EPISODE,
                recording=RECORDING,
                steps=STEPS,
                runs=self.folder / "runs",
            )
        )

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env={"XDG_STATE_HOME": str(self.folder / "state")}, timeout=280)


@pytest.fixture
def site(hosts: Hosts, arms: None) -> Iterator[Site]:
    made = Site(hosts)
    try:
        yield made
    finally:
        made.rlinf("down", "--force")


def test_two_arms_feed_a_learner_on_a_third_machine(site: Site) -> None:
    learner, pcs = site.hosts[LEARNER], [site.hosts[name] for name in PCS]
    for pc in pcs:
        assert pc.run([str(site.no_torch), "-c", "import torch"], check=False).returncode != 0
    before = {host.name: set(host.processes()) for host in (learner, *pcs)}
    up = site.rlinf("up", str(site.file), "--timeout", "90")
    assert up.returncode == 0, up.stderr

    done = site.rlinf("train", str(site.file), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "finished"
    last = json.loads((Path(report["folder"]) / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    # Two updates for each step after the first 60; a third of the steps are a person's.
    assert last["train/updates"] == last["replay/online"] == 2 * EPISODE * STEPS
    assert last["env/intervened"] == pytest.approx(1 / 3)
    check_recording(site)
    for rank, pc in enumerate(pcs):
        log = (Path(report["folder"]) / "logs" / "env" / f"rank_{rank}.log").read_text()
        assert pc.address in log.splitlines()[0]

    down = site.rlinf("down")
    assert down.returncode == 0, down.stderr
    for host in (learner, *pcs):
        until(lambda host=host: set(host.processes()) <= before[host.name], f"the end of all on {host.name}")
        assert "rlinf" not in host.run(["ls", "/tmp", "/dev/shm"]).stdout


def check_recording(site: Site) -> None:
    """Compare what the learner's machine has on disk with what the persons at the two arms did, tick by tick."""
    for name in PCS:
        assert site.hosts[name].run(["ls", RECORDING], check=False).returncode != 0
    seen = site.folder / "recording"
    site.hosts[LEARNER].sh(f"cp -r {RECORDING} {seen}")
    recorded = list(read_segments(seen / "0"))
    assert sum(int(item["valid"].sum()) for item in recorded) == 2 * EPISODE * STEPS
    flags = np.concatenate([item["interventions"] for item in recorded])
    truth = np.stack([steered(np.arange(EPISODE), env) for env in range(2)], axis=1)
    assert np.array_equal(flags, np.tile(truth, (STEPS, 1)))
    shutil.rmtree(seen)
