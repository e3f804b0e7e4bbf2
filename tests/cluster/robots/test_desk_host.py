"""A person's desk on another host than the arm, and a run with a person."""

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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import read_segments
from tests.cluster import without_torch
from tests.cluster.hosts import Hosts
from tests.cluster.robots.test_robot_links import PORT, WATCH, Program
from tests.every_third import steered
from tests.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

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


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
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


LEARNER, PCS = "trainer0", ("render0", "robot0")
# Both arms have the same address, each on a network of its own; a host's /tmp is its own, too.
ARM, RECORDING = "127.0.0.9", "/tmp/recording"
EPISODE, STEPS = 15, 4
JOB_OF_A_PERSON = """\
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
        base = Path(__file__).parents[3] / "configs" / "embodied/franka-hil-2arms.yaml"
        self.file.write_text(
            JOB_OF_A_PERSON.format(
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


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(900)
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
