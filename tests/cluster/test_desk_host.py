"""An arm's PC without torch, a learner, and the desk of a person at the page: three hosts, one run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.cluster import without_torch
from tests.cluster.hosts import Hosts
from tests.cluster.test_robot_links import PORT, WATCH, Program
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

LEARNER, PC, DESK = "trainer0", "robot0", "render0"
PAGE, TOKEN_FILE, TOKEN = 17321, "/tmp/token", "0123456789abcdef0123456789abcdef"
HOLD_STEPS, LOST_STEPS = 4, 60
ON_THE_WAY = 2  # messages that the cut link has delivered already
FILE = """\
recipe: embodied
cluster:
  num_nodes: 2
  ports: 24000-24199
  component_placement:
    actor,rollout: {{node_group: learner, placement: 0}}
    env: {{node_group: arms, placement: 0}}
  node_groups:
    - {{label: learner, node_ranks: 0, hosts: trainer0}}
    - label: arms
      node_ranks: 1
      hosts: robot0
      hardware:
        type: Franka
        configs: [{{node_rank: 1, robot_ip: 127.0.0.1, robot_port: {port}}}]
      env_configs: [{{node_ranks: 1, python_interpreter_path: {no_torch}}}]
env:
  train:
    env_type: franka_robot
    total_num_envs: 1
    max_episode_steps: 200
    max_steps_per_rollout_epoch: 200
    intervention:
      source: browser
      options: {{token_file: {token}, host: {host}, port: {page}, hold_steps: {hold}, lost_steps: {lost}}}
actor: {{global_batch_size: 16, model: {{model_type: squashed_policy, hidden_dim: 16}}}}
algorithm: {{loss_type: sac, off_policy: {{learning_starts: 20, replay: {{capacity: 10000}}}}}}
runner: {{max_steps: 10000, max_restarts: 0, val_check_interval: -1, logger: {{log_path: {runs}}}}}
"""


class Desk(Program):
    """The page on its host."""

    def __init__(self, hosts: Hosts, token: str) -> None:
        super().__init__(hosts[DESK], "-m", "tests.cluster.desk", hosts[PC].address, str(PAGE), token)
        self.told: list[tuple[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.lines():
            word, _, value = line.partition(" ")
            self.told.append((word, json.loads(value)))

    def of(self, word: str) -> list[Any]:
        return [value for known, value in list(self.told) if known == word]

    def hold(self, keys: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{keys}\n")
        self._process.stdin.flush()


class DeskRun:
    """The run of `FILE`, from the control host, and the record of the arm's controller."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "desk"
        self.folder.mkdir()
        self.no_torch = hosts.interpreter(without_torch.NAME, first_line=without_torch.FIRST_LINE)
        self.file = self.folder / "desk.yaml"
        about: dict[str, Any] = {"no_torch": self.no_torch, "token": TOKEN_FILE, "host": hosts[PC].address}
        runs = self.folder / "runs"
        self.file.write_text(FILE.format(**about, port=PORT, page=PAGE, hold=HOLD_STEPS, lost=LOST_STEPS, runs=runs))
        self.env = {"XDG_STATE_HOME": str(self.folder / "state")}
        self.train: subprocess.Popen[str] | None = None

    def rlinf(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.control.rlinf(*arguments, env=self.env, timeout=400)

    def start(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "rlinf_cli", "train", str(self.file)]
        out = (self.folder / "output").open("w")
        self.train = self.hosts.control.spawn(words, env=self.env, stdout=out, stderr=subprocess.STDOUT)
        return self.train

    def output(self) -> str:
        return " ".join((self.folder / "output").read_text().split())

    def metrics(self) -> list[dict[str, float]]:
        lines = [line for file in (self.folder / "runs").glob("*/metrics.jsonl") for line in file.open()]
        return [json.loads(line)["metrics"] for line in lines if line.endswith("\n")]

    def has(self, name: str) -> bool:
        """Return whether a metric was above 0 in some step; fails where the run has ended."""
        assert self.train is not None
        assert self.train.poll() is None, self.output()
        return any(metrics.get(name, 0) > 0 for metrics in self.metrics())


@pytest.fixture
def arm(hosts: Hosts) -> Iterator[Callable[[], Program]]:
    """The controller of an arm beside the PC. Begins to watch it; who asks nothing for a minute is cut off."""
    words = ("-m", "recipes.embodied.robots.controller.simulated_controller", "--port", str(PORT))
    controller = Program(hosts[PC], *words)
    assert controller.line().startswith("listening on ")
    watchers: list[Program] = []

    def watch() -> Program:
        watchers.append(Program(hosts[PC], "-c", WATCH, "127.0.0.1", str(PORT)))
        return watchers[-1]

    yield watch
    for pid, command in hosts[PC].processes().items():
        if "simulated_controller" in command:
            hosts[PC].run(["kill", str(pid)], check=False)
    for program in (*watchers, controller):
        program.end()


@pytest.fixture
def run(hosts: Hosts, arm: Callable[[], Program]) -> Iterator[DeskRun]:
    made = DeskRun(hosts)
    hosts[PC].sh(f"umask 077; echo {TOKEN} > {TOKEN_FILE}")
    try:
        yield made
    finally:
        if made.train is not None and made.train.poll() is None:
            made.train.terminate()
            made.train.wait(120)
        made.rlinf("down", "--force")


@pytest.fixture
def desks(hosts: Hosts) -> Iterator[list[Desk]]:
    opened: list[Desk] = []
    yield opened
    for desk in opened:
        desk.end()


def test_page_on_a_third_host_steers_an_arm_that_learns(
    run: DeskRun, arm: Callable[[], Program], desks: list[Desk]
) -> None:
    hosts = run.hosts
    assert hosts[PC].run([str(run.no_torch), "-c", "import torch"], check=False).returncode != 0
    up = run.rlinf("up", str(run.file), "--timeout", "300")
    assert up.returncode == 0, up.stderr
    train = run.start()
    until(lambda: run.has("train/updates"), "an update", 300, pause=0.2)

    stranger = Desk(hosts, "a wrong token")
    desks.append(stranger)
    until(lambda: stranger.of("closed"), "an end of the stranger's connection", 60)
    assert stranger.of("picture") == stranger.of("state") == []

    person = Desk(hosts, TOKEN)
    desks.append(person)
    until(lambda: person.of("picture"), "a picture", 60)
    assert person.of("page") == [200]
    assert person.of("answer")[0]["ok"] is True
    person.hold("w")
    until(lambda: any(told.get("acts") == "you" for told in person.of("state")), "the person in charge", 60)
    until(lambda: run.has("env/intervened"), "a step of the person", 120, pause=0.2)

    # Early in an episode, whose end moves the arm to the next start.
    until(lambda: person.of("state")[-1].get("step") in range(1, 60), "the next episode", 120)
    watcher = arm()
    targets = [target(watcher)]
    until(lambda: not np.array_equal(target(watcher), targets[0]), "a motion", 30)
    with hosts[DESK].unplugged():
        targets = [target(watcher)]
        # They are in charge, so the policy does not go on: the arm stays where it is until the run ends.
        until(lambda: targets.append(target(watcher)) or train.poll() is not None, "the end of the run", 200)
    moves = sum(not np.array_equal(before, after) for before, after in itertools.pairwise(targets))
    assert moves <= HOLD_STEPS + ON_THE_WAY
    assert train.returncode != 0
    said = run.output()
    assert f"the operator has been silent for {LOST_STEPS} steps" in said, said
    assert "reconnect in time" in said
    # It was at rest when the run gave it back.
    until(lambda: state(watcher)["holder"] is None, "a free arm", 30)
    assert state(watcher)["still_tick"] is not None
    down = run.rlinf("down")
    assert down.returncode == 0, down.stderr


def state(arm: Program) -> dict[str, Any]:
    return json.loads(arm.ask(""))


def target(arm: Program) -> list[float]:
    return state(arm)["target"]
