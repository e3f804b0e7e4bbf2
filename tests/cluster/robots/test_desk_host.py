"""An arm's PC without torch, a learner, and the desk of a person with a browser: three hosts, one run."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.cluster import without_torch
from tests.cluster.hosts import Hosts
from tests.cluster.robots.test_robot_links import PORT, WATCH, Program
from tests.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

PC, DESK, OTHER_DESK = "robot0", "render0", "render1"
PAGE, TOKEN_FILE, TOKEN = 17321, "/tmp/token", "0123456789abcdef0123456789abcdef"
HOLD_STEPS, LOST_STEPS = 4, 300
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
    max_episode_steps: 400  # longer than anybody is silent
    max_steps_per_rollout_epoch: 400
    intervention:
      source: browser
      options: {{token_file: {token}, host: {host}, port: {page}, hold_steps: {hold}, lost_steps: {lost}}}
actor: {{global_batch_size: 16, model: {{model_type: squashed_policy, hidden_dim: 16}}}}
algorithm: {{loss_type: sac, learning_starts: 20, replay: {{capacity: 10000}}}}
runner: {{max_steps: 10000, max_restarts: 0, val_check_interval: -1, logger: {{log_path: {runs}}}}}
"""


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


class Desk:
    """The page in a browser on a host. It goes on where the host's cable is pulled: the keys stay down."""

    def __init__(self, playwright: Any, hosts: Hosts, host: str, pc: str) -> None:
        program = hosts.folder / f"browser-on-{host}"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(hosts[host].argv([str(CHROMIUM)]))} "$@"\n')
        program.chmod(0o700)
        self.browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        self.page = self.browser.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(f"http://{hosts[pc].address}:{PAGE}/")

    def enter(self, token: str) -> None:
        self.page.fill("#token", token)
        self.page.click("button[type=submit]")

    def status(self) -> str:
        return self.page.text_content("#status")

    def sees(self) -> bool:
        return self.page.query_selector("#cameras img") is not None

    def pictures(self) -> int:
        """Return how many were drawn so far."""
        return self.page.evaluate("[...cameras.values()].reduce((sum, view) => sum + (view.count || 0), 0)")

    def step(self) -> int:
        """Return the step of the episode."""
        return int(self.page.text_content("#episode").rpartition(" ")[2])

    def hold(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.down(key)
        self.page.wait_for_selector("#status.you")


@pytest.fixture
def desk(hosts: Hosts) -> Iterator[Callable[[str], Desk]]:
    """Opens the page on a host."""
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        opened: list[Desk] = []

        def open_page(host: str) -> Desk:
            opened.append(Desk(playwright, hosts, host, PC))
            return opened[-1]

        yield open_page
        for item in opened:
            item.browser.close()


def moves_until(watcher: Program, condition: Callable[[], object], what: str, seconds: float) -> int:
    """Return how often the target of the arm was moved until a condition held."""
    targets = [target(watcher)]
    until(lambda: targets.append(target(watcher)) or condition(), what, seconds)
    return sum(not np.array_equal(before, after) for before, after in itertools.pairwise(targets))


def test_page_on_a_third_host_steers_an_arm_that_learns(
    run: DeskRun,
    arm: Callable[[], Program],
    desk: Callable[[str], Desk],
    record_property: Callable[[str, object], None],
) -> None:
    hosts = run.hosts
    assert hosts[PC].run([str(run.no_torch), "-c", "import torch"], check=False).returncode != 0
    up = run.rlinf("up", str(run.file), "--timeout", "300")
    assert up.returncode == 0, up.stderr
    train = run.start()
    until(lambda: run.has("train/updates"), "an update", 300, pause=0.2)

    person, other = desk(DESK), desk(OTHER_DESK)
    other.enter("a wrong token of good length")
    other.page.wait_for_selector("text=The token is wrong")
    assert not other.sees()
    person.enter(TOKEN)
    person.page.wait_for_selector("#cameras img")
    person.hold("Shift", "KeyW")
    until(lambda: run.has("env/intervened"), "a step of the person", 200, pause=0.2)
    other.enter(TOKEN)
    other.page.wait_for_selector("text=Somebody else is steering")
    assert not other.sees()

    begun, before = time.monotonic(), person.pictures()
    person.page.wait_for_timeout(5000)
    rate, delay = (person.pictures() - before) / (time.monotonic() - begun), person.page.text_content("#delay")
    record_property("pictures", f"{rate:.1f} in a second, on the screen after {delay}")
    print(
        f"{rate:.1f} pictures in a second, the newest on the screen {delay} after it was sent; load {os.getloadavg()}"
    )
    assert 0 < rate <= 12
    assert delay.endswith(" ms")

    # Early in an episode, whose end moves the arm to the next start.
    until(lambda: person.step() in range(1, 60), "the next episode", 120)
    watcher = arm()
    moved = target(watcher)
    until(lambda: not np.array_equal(target(watcher), moved), "a motion", 30)
    with hosts[DESK].unplugged():
        # Their link is dead without a word: the next who proves to have the token steers.
        def replaced() -> bool:
            if "Somebody else is steering" in other.status():
                other.enter(TOKEN)
            return other.sees()

        # They were in charge, so the policy does not go on: the arm stays where it is.
        assert moves_until(watcher, replaced, "another person at the desk", 60) <= HOLD_STEPS + ON_THE_WAY
        other.hold("Shift", "KeyS")
        moved = target(watcher)
        until(lambda: not np.array_equal(target(watcher), moved), "a motion by the second person", 30)
    person.page.wait_for_selector("text=/Somebody else (has taken over|is steering)/")
    assert train.poll() is None, run.output()

    until(lambda: other.step() in range(1, 60), "the next episode", 120)
    with hosts[OTHER_DESK].unplugged():
        ended = moves_until(watcher, lambda: train.poll() is not None, "the end of the run", 200)
    assert ended <= HOLD_STEPS + ON_THE_WAY
    assert train.returncode != 0
    said = run.output()
    assert f"the operator has been silent for {LOST_STEPS} steps" in said, said
    assert "reconnect in time" in said
    # It was at rest when the run gave it back.
    until(lambda: state(watcher)["holder"] is None, "a free arm", 30)
    assert state(watcher)["still_tick"] is not None
    assert person.complaints == other.complaints == []
    down = run.rlinf("down")
    assert down.returncode == 0, down.stderr


def state(arm: Program) -> dict[str, Any]:
    return json.loads(arm.ask(""))


def target(arm: Program) -> list[float]:
    return state(arm)["target"]
