"""A run over hosts, and its live view."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import seer
from tests.cluster.hosts import Hosts
from tests.cluster.started_run import started_run
from tests.waiting import until

ARM, ARM_PORT = "127.0.0.9", 17310
FILE = """\
recipe: embodied
cluster:
  num_nodes: 3
  ports: 23000-23199
  node_groups:
    - {{label: train, node_ranks: 0, hosts: trainer0}}
    - label: sim
      node_ranks: 1
      hosts: render0
      env_configs: [{{node_ranks: 1, python_interpreter_path: {theirs}, env_vars: [{{MUJOCO_GL: egl}}]}}]
    - label: franka
      node_ranks: 2
      hosts: robot0
      hardware: {{type: Franka, configs: [{{node_rank: 2, robot_ip: {arm}}}]}}
  component_placement:
    actor: {{node_group: train, placement: 0}}
    rollout: {{node_group: sim, placement: 0}}
    env: {{node_group: franka, placement: 0}}
env:
  train:
    {{env_type: franka_kin, task: pick, total_num_envs: 32, max_episode_steps: 20, max_steps_per_rollout_epoch: 20}}
actor: {{global_batch_size: 320}}
runner:
  max_steps: 3
  val_check_interval: -1
  save_interval: 2
  logger: {{log_path: {runs}}}
"""
ON_THE_ARM = (
    "env.train.env_type=franka_robot",
    "env.train.task=reach",
    "env.train.total_num_envs=1",
    "env.train.max_episode_steps=8",
    "env.train.max_steps_per_rollout_epoch=8",
    "actor.global_batch_size=8",
    "runner.max_steps=2",
)


class Three:
    """The cluster of `FILE`, from the control host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "three"
        self.folder.mkdir()
        self.runs = self.folder / "runs"
        self.file = self.folder / "three.yaml"
        self.file.write_text(FILE.format(theirs=hosts.interpreter("sim"), arm=ARM, runs=self.runs))

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env={"XDG_STATE_HOME": str(self.folder / "state")})

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """A run without an end that has done a step, and its folder."""
        runs = self.folder / name
        command = [sys.executable, "-m", "rlinf_cli", "train", str(self.file), "runner.max_steps=-1"]
        env = {"XDG_STATE_HOME": str(self.folder / "state")}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.hosts.control.spawn([*command, f"runner.logger.log_path={runs}"], env=env, **options)

        def has_stepped() -> bool:
            return any(file.stat().st_size for file in runs.glob("*/metrics.jsonl"))

        with started_run(process, runs, has_stepped, "the first step", seconds=200) as run:
            yield run

    def train(self, *overrides: str) -> Path:
        """Return the folder of a run that went to its end."""
        done = self.rlinf("train", str(self.file), "--json", *overrides)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["status"] == "finished"
        return Path(report["folder"])


@pytest.fixture(scope="module")
def three(hosts: Hosts) -> Iterator[Three]:
    made = Three(hosts)
    done = made.rlinf("up", str(made.file), "--timeout", "90")
    assert done.returncode == 0, done.stderr
    yield made
    made.rlinf("down", "--force")


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_three_machines_train_one_policy(three: Three) -> None:
    run = three.train()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # Weights went from the first machine to the second, and what the third saw came back.
    assert all("env/return" in line["metrics"] and "train/actor/policy_loss" in line["metrics"] for line in lines)
    assert len({line["metrics"]["train/actor/policy_loss"] for line in lines}) == 3
    assert sorted(path.name for path in (run / "checkpoints").glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]
    where = {part: (run / "logs" / part / "rank_0.log").read_text() for part in ("actor", "rollout", "env")}
    for part, host in (("actor", "trainer0"), ("rollout", "render0"), ("env", "robot0")):
        assert three.hosts[host].address in where[part].splitlines()[0]


@pytest.mark.netns
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_processes_have_the_environment_that_was_shown_before(three: Three) -> None:
    env = {"XDG_STATE_HOME": str(three.folder / "state")}
    control, assume = three.hosts.control, ("train=0", "sim=0")
    assert seer.compare(control, "three", three.file, sys.executable, env, assume) == 3


@pytest.mark.netns
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_the_env_of_a_robots_host_drives_its_arm(three: Three) -> None:
    robot = three.hosts["robot0"]
    command = [sys.executable, "-m", "recipes.embodied.robots.controller.simulated_controller", "--host", ARM]
    controller = robot.spawn(
        [*command, "--port", str(ARM_PORT), "--speed", "20"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert controller.stdout is not None
        assert controller.stdout.readline()
        run = three.train(*ON_THE_ARM)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    finally:
        # Past the command that entered the host for it.
        for pid, words in robot.processes().items():
            if "simulated_controller" in words:
                robot.run(["kill", str(pid)], check=False)
        controller.communicate(timeout=60)


@pytest.mark.netns
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_link_that_is_cut_is_told_with_what_to_do_about_it(three: Three) -> None:
    with three.training("cut") as (process, folder):
        with three.hosts["robot0"].unplugged():
            out, _ = process.communicate(timeout=200)
        # The worker there counts as dead, and the run begins again; then it is the node that is missing.
        assert "`EnvGroup:0` on node 2 (" in out, out
        assert process.returncode == 3, out
        output = out.partition("error: ")[2]
        assert "has not answered since" in output, out
        assert "reaches the head" in output
        assert "install" not in output
        assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    # Ray gives the node up for good, and says why.
    until(lambda: "node 2 " in three.rlinf("status").stdout, "the answer of the head", seconds=60)
    refused = three.rlinf("train", str(three.file))
    if refused.returncode:
        assert "install" not in refused.stderr
        assert "`rlinf up FILE`" in refused.stderr
    done = three.rlinf("up", str(three.file), "--timeout", "90")
    assert done.returncode == 0, done.stderr
    three.train("runner.max_steps=1")


@pytest.mark.netns
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_taking_the_cluster_down_by_force_ends_its_run(three: Three) -> None:
    with three.training("forced") as (process, folder):
        done = three.rlinf("down", "--force")
        out, _ = process.communicate(timeout=100)
        assert done.returncode == 0, done.stderr
        # The driver was asked to end: one that misses Ray fails with another status.
        assert process.returncode == 143, out
        state = json.loads((folder / "run.json").read_text())
        assert (state["status"], state["reason"]) == ("interrupted", "terminated"), out
    done = three.rlinf("up", str(three.file), "--timeout", "90")
    assert done.returncode == 0, done.stderr


if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts


DECLARED = """\
cluster:
  num_nodes: 3
  ssh: {connect_timeout: 5}
  node_groups:
    - label: trainer
      node_ranks: 0-1
      hosts: trainer[0-1]
      accelerators: {per_node: 2}
    - {label: render, node_ranks: 2, hosts: render0}
  component_placement:
    actor: {node_group: trainer, placement: all}
    env: {node_group: render, placement: 0}
"""
UNDECLARED = DECLARED.replace("      accelerators: {per_node: 2}\n", "")


@pytest.mark.netns
@pytest.mark.timeout(180)
def test_what_is_declared_is_compared_with_what_the_nodes_have(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(DECLARED)
    with ExitStack() as stack:
        stack.enter_context(hosts["trainer0"].nvidia(2))
        with hosts["trainer1"].nvidia(2):
            sound = hosts.control.rlinf("validate", str(path), "--live")
        stack.enter_context(hosts["trainer1"].nvidia(1))
        lacking = hosts.control.rlinf("validate", str(path), "--live", "--json")
    assert sound.returncode == 0, sound.stderr
    assert "lab.yaml: valid" in sound.stdout
    assert lacking.returncode == 2, lacking.stderr
    findings = json.loads(lacking.stdout)["diagnostics"]
    (finding,) = (finding for finding in findings if finding["severity"] == "error")
    assert (finding["code"], finding["line"]) == ("accelerators-differ", 8)
    assert finding["message"] == "group `trainer` declares 2 accelerators, found 1 accelerator on node 1"


@pytest.mark.netns
@pytest.mark.timeout(180)
def test_who_runs_where_on_what_the_nodes_have(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(UNDECLARED)
    with hosts["trainer0"].nvidia(3), hosts["trainer1"].nvidia(1):
        shown = hosts.control.rlinf("inspect", "placement", str(path), "--live", "--json")
    assert shown.returncode == 0, shown.stderr
    actor = json.loads(shown.stdout)["components"]["actor"]["processes"]
    assert [(item["node_rank"], item["local_hardware_ranks"]) for item in actor] == [
        (0, [0]),
        (0, [1]),
        (0, [2]),
        (1, [0]),
    ]


@pytest.mark.netns
@pytest.mark.timeout(180)
def test_a_node_that_cannot_be_asked_is_named(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(DECLARED)
    hosts.control.forget_connections()
    with hosts["render0"].refusing_keys():
        ended = hosts.control.rlinf("validate", str(path), "--live")
    assert ended.returncode == 3, ended.stdout
    assert "1 of 3 nodes could not be probed" in ended.stderr
    assert "node 2 (render0)" in ended.stderr
    assert "key refused" in ended.stderr
