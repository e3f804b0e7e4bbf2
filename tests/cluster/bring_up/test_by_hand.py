"""Bring-up by hand, and spares."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_events import RunEvent, story_with_faults
from tests.cluster.hosts import Hosts
from tests.cluster.ray_hosts import PORT, RayHosts, with_env
from tests.cluster.started_run import started_run
from tests.waiting import until

FILE = """\
recipe: embodied
cluster:
  num_nodes: 2
  component_placement: {{"actor,rollout": {{node_group: node, placement: 0}}, env: {{node_group: node, placement: 1}}}}
env:
  train:
    {{env_type: franka_kin, task: pick, total_num_envs: 8, max_episode_steps: 10, max_steps_per_rollout_epoch: 10}}
actor: {{global_batch_size: 80}}
runner:
  max_steps: 1
  val_check_interval: -1
  logger: {{log_path: {runs}}}
"""


class ByHand:
    """Ray on `render0`, which is its head and has rank 1, and on `render1` with another interpreter and rank 0."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.ray = RayHosts(hosts.folder / "accepted", hosts["render0"], hosts["render1"])

    def begin(self) -> None:
        self.ray.begin(self.hosts["render0"], env={"RLINF_NODE_RANK": "1"})
        self.ray.wait_for_head()
        sim = str(self.hosts.interpreter("sim"))
        self.ray.begin(self.hosts["render1"], env={"RLINF_NODE_RANK": "0"}, python=sim)
        end = time.monotonic() + 90
        while self.listed().count("ALIVE") != 2:
            assert time.monotonic() < end, self.listed()
            time.sleep(0.5)

    def listed(self) -> str:
        """Return the states of the nodes, as Ray itself tells them."""
        code = (
            "import sys; from ray._raylet import GcsClient\n"
            "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values()\n"
            "print(*('ALIVE' if node.state == 0 else 'DEAD' for node in nodes))"
        )
        command = [sys.executable, "-c", code, self.ray.address]
        return self.hosts["render0"].run(with_env(self.ray.environment, command), check=False).stdout

    def rlinf(self, name: str, *arguments: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
        """Return what `rlinf` answers on a host."""
        env = {**self.ray.environment, "RLINF_ADDRESS": address or self.ray.address}
        command = [sys.executable, "-m", "rlinf_cli", *arguments]
        return self.hosts[name].run(with_env(env, command), check=False, timeout=200)


@pytest.fixture(scope="module")
def by_hand(hosts: Hosts) -> Iterator[ByHand]:
    made = ByHand(hosts)
    try:
        made.begin()
        yield made
    finally:
        made.ray.end()


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_status_shows_it_on_each_of_its_nodes(by_hand: ByHand) -> None:
    def seen(name: str) -> dict[str, Any]:
        done = by_hand.rlinf(name, "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    addresses = [by_hand.hosts[name].address for name in ("render1", "render0")]
    for name in ("render0", "render1"):
        report = seen(name)
        assert (report["cluster"], report["address"], report["whole"]) == (None, by_hand.ray.address, True)
        assert [(node["rank"], node["address"]) for node in report["nodes"]] == list(enumerate(addresses))
        assert report["jobs"] == []


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_machine_that_is_no_node_of_it_is_told_so(by_hand: ByHand) -> None:
    done = by_hand.rlinf("robot0", "status")
    assert done.returncode == 3, done.stderr
    assert f"this machine is not a node of the cluster at {by_hand.ray.address}" in done.stderr
    assert "StackTrace" not in done.stderr


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_where_nothing_answers_is_told_at_once(by_hand: ByHand) -> None:
    address = f"{by_hand.hosts['render0'].address}:{PORT + 1}"
    done = by_hand.rlinf("render0", "status", address=address)
    assert done.returncode == 3, done.stderr
    assert f"the cluster at {address} does not answer" in done.stderr


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_down_leaves_it_alone(by_hand: ByHand) -> None:
    done = by_hand.rlinf("render0", "down")
    assert (done.returncode, done.stdout) == (0, "no cluster is up\n")
    assert by_hand.listed().split() == ["ALIVE", "ALIVE"]


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_job_trains_over_it(by_hand: ByHand, hosts: Hosts) -> None:
    # Under /var/tmp, which all hosts see.
    file, runs = by_hand.ray.folder / "two.yaml", by_hand.ray.folder / "runs"
    file.write_text(FILE.format(runs=runs))
    done = by_hand.rlinf("render0", "train", str(file), "--json")
    assert done.returncode == 0, done.stderr
    logs = Path(json.loads(done.stdout)["folder"]) / "logs"
    # Ranks are what `RLINF_NODE_RANK` says, though the head of Ray has another than 0.
    for part, name in (("actor", "render1"), ("rollout", "render1"), ("env", "render0")):
        assert hosts[name].address in (logs / part / "rank_0.log").read_text().splitlines()[0]


NAMES = ("trainer0", "render0", "render1", "robot0")
WITH_A_SPARE = """\
recipe: embodied
cluster:
  num_nodes: 4
  spare_nodes: 1
  ports: 23000-23199
  node_groups:
    - {{label: train, node_ranks: 0, hosts: trainer0}}
    - {{label: sim, node_ranks: 1-3, hosts: [render0, render1, robot0]}}
  component_placement:
    actor,rollout: {{node_group: train, placement: 0}}
    env: {{node_group: sim, placement: all}}
env:
  train: {{total_num_envs: 32, max_episode_steps: 20, max_steps_per_rollout_epoch: 20}}
actor: {{global_batch_size: 320}}
runner:
  max_steps: 10
  val_check_interval: -1
  save_interval: 2
  logger: {{log_path: {runs}}}
"""


class Four:
    """The cluster of `FILE`, from the control host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "four"
        self.folder.mkdir()
        self.file = self.folder / "four.yaml"
        self.file.write_text(WITH_A_SPARE.format(runs=self.folder / "runs"))
        self._env = {"XDG_STATE_HOME": str(self.folder / "state")}

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env=self._env, timeout=600)

    def up(self) -> None:
        done = self.rlinf("up", str(self.file), "--timeout", "300")
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def training(self, name: str, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """A run that has saved a checkpoint, and its folder."""
        runs = self.folder / name
        command = [sys.executable, "-m", "rlinf_cli", "train", str(self.file), f"runner.logger.log_path={runs}"]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.hosts.control.spawn([*command, *overrides], env=self._env, **options)
        saved = "*/checkpoints/global_step_*/manifest.json"
        with started_run(process, runs, lambda: any(runs.glob(saved)), "the first checkpoint", seconds=600) as run:
            yield run


@pytest.fixture(scope="module")
def four(hosts: Hosts) -> Iterator[Four]:
    made = Four(hosts)
    made.up()
    yield made
    made.rlinf("down", "--force")


def learned(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "speed/", "memory/")
    return [{name: value for name, value in line["metrics"].items() if not name.startswith(measured)} for line in lines]


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_spare_serves_as_the_host_that_is_lost(four: Four) -> None:
    with four.training("lost") as (process, disturbed):
        four.hosts["render0"].kill()
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    lost, spare = four.hosts["render0"].address, four.hosts["robot0"].address
    assert f"node 3 ({spare}), a spare, serves as node 1; node 1 ({lost}) joined and was lost" in out
    why = four.rlinf("why", str(disturbed)).stdout
    assert "cannot be reached any more" in why, why
    assert f"node 3 ({spare}), a spare, serves as node 1" in why
    # The node comes back, and has its own place again where the next run begins.
    four.hosts["render0"].restart()
    four.up()
    done = four.rlinf("train", str(four.file), "--json")
    assert done.returncode == 0, done.stderr
    assert "a spare, serves" not in done.stderr
    undisturbed = Path(json.loads(done.stdout)["folder"])
    assert learned(disturbed) == learned(undisturbed)


ELASTIC = (
    *("cluster.spare_nodes=0", "cluster.component_placement.env={node_group: sim, placement: all, elastic: true}"),
    *("env.train.total_num_envs=24", "actor.global_batch_size=240", "runner.max_steps=-1", "runner.save_interval=1"),
)


class Steps:
    """The finished steps of a run that goes on, as they are seen."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.last = 0

    def until_event(self, text: str, after: int) -> RunEvent:
        """Return the first event of the nodes with this text that follows `after` others, once a step has followed."""
        seen: list[RunEvent] = []

        def look() -> bool:
            step = max(self.numbers(), default=0)
            events = [event for event in story_with_faults(self.run)[0] if event.kind == run_events.NODES]
            seen[:] = [event for event in events[after:] if text in event.text]
            # Read before the events: it had finished before one that is not there yet.
            self.last = self.last if seen else max(self.last, step)
            return bool(seen) and step > seen[0].step

        until(look, text, 600, 0.1)
        return seen[0]

    def numbers(self) -> list[int]:
        """Return the steps that the run has kept."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [int(json.loads(line)["step"]) for line in lines if line.endswith("\n")]


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_elastic_node_goes_and_comes_back_twice(four: Four) -> None:
    address = four.hosts["render0"].address
    with four.training("elastic", *ELASTIC) as (process, run):
        steps = Steps(run)
        for turn in range(2):
            four.hosts["render0"].kill()
            lost = steps.until_event("`env` goes on without node 1", 2 * turn)
            assert address in lost.details[0]
            # But for the step whose checkpoint was being written.
            assert lost.step >= steps.last - 1
            four.hosts["render0"].restart()
            four.up()
            back = steps.until_event("node 1 is back", 2 * turn + 1)
            assert back.step >= steps.last
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 143, out
    story, _ = story_with_faults(run)
    assert len([event for event in story if event.kind == run_events.RESTARTED]) == 2
    numbers = steps.numbers()
    assert numbers == list(range(1, len(numbers) + 1))
    assert "env: 3 processes" in out
