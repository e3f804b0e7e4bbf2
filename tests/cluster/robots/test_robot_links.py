"""Faults between a robot's PC and the controller of its arm, which are two machines: the arm stands still in time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import read_segments
from recipes.embodied.robots.wire_protocol import ArmState
from tests.cluster.host import Host
from tests.cluster.hosts import Hosts
from tests.cluster.robots.robot_holder import CALL_SECONDS
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(300)]

PORT, RELAY_PORT = 17310, 17311
STOP_PERIODS = 2
WATCH = """
import json, sys
from recipes.embodied.robots.controller_client import FrankaClient
from rlinf_core.hardware.franka import Franka

client = FrankaClient(Franka(node_rank=0, robot_ip=sys.argv[1], robot_port=int(sys.argv[2])))
for _ in sys.stdin:
    print(json.dumps(client._request("state")), flush=True)
"""


class Program:
    """A program on a host, asked by lines and answering by lines."""

    def __init__(self, host: Host, *words: str) -> None:
        self._process = host.spawn(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.line()

    def line(self) -> str:
        return self.lines().readline()

    def lines(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


class Cell:
    """An arm's controller on `render0`, its holder on `robot0`, a relay between them on `render1`.

    Attributes:
        controller: host of the arm's controller.
        pc: host of its holder.
        relay: the way between them, which takes delays in seconds.
        told: what the holder has said so far, in lines.
    """

    def __init__(self, hosts: Hosts, folder: Path, *, is_relayed: bool) -> None:
        self.controller, self.pc, self.folder = hosts["render0"], hosts["robot0"], folder
        self.reports: list[str] = []
        self._started: list[Program] = []
        self.where = self.controller.address, PORT
        words = (
            "-m",
            "recipes.embodied.robots.controller.simulated_controller",
            "--host",
            self.where[0],
            "--port",
            str(PORT),
        )
        assert self._start(self.controller, *words).line().startswith("listening on ")
        self._watcher = self._start(self.controller, "-c", WATCH, *map(str, self.where))
        if is_relayed:
            between = hosts["render1"]
            self.relay = self._start(between, "-m", "tests.cluster.slow_link", str(RELAY_PORT), *map(str, self.where))
            assert self.relay.line() == "ready\n"
            self.where = between.address, RELAY_PORT
        holder = self._start(self.pc, "-m", "tests.cluster.robots.robot_holder", *map(str, self.where), str(folder))
        threading.Thread(target=lambda: self.reports.extend(holder.lines()), daemon=True).start()
        until(lambda: self.count("moved") >= 20, "the arm to be moved", seconds=60)

    @property
    def name(self) -> str:
        """What errors call the arm."""
        return f"Franka arm {self.where[0]}:{self.where[1]} of node 4"

    def state(self) -> ArmState:
        """Return the controller's own record, asked for on its machine."""
        return ArmState.of(json.loads(self._watcher.ask("")))

    def count(self, word: str) -> int:
        return sum(line.startswith(word) for line in list(self.reports))

    def last(self, word: str) -> str:
        return next(line for line in reversed(list(self.reports)) if line.startswith(word))

    def check_recordings(self) -> None:
        """Compare what is on disk with what the holder told of, to the bit."""
        messages = [line.split()[1] for line in list(self.reports) if line.startswith("moved ")]
        results = [record["joints"].tobytes().hex() for record in read_segments(self.folder)]
        assert len(messages) >= 20
        # The last one may be recorded and not told yet.
        assert results[: len(messages)] == messages
        assert len(results) <= len(messages) + 1

    def end(self) -> None:
        for host, words in ((self.controller, "simulated_controller"), (self.pc, "robot_holder")):
            for pid, command in host.processes().items() if host.alive else ():
                if words in command:
                    host.run(["kill", "-KILL", str(pid)], check=False)
        for program in self._started:
            program.end()

    def _start(self, host: Host, *words: str) -> Program:
        self._started.append(Program(host, *words))
        return self._started[-1]


@contextlib.contextmanager
def moving_arm(hosts: Hosts, name: str, *, is_relayed: bool) -> Generator[Cell]:
    """An arm that is moved, and a recording in the hosts' folder, which all of them see."""
    folder = hosts.folder / "recordings" / name
    folder.mkdir(parents=True)
    made = Cell(hosts, folder, is_relayed=is_relayed)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def cell(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Cell]:
    with moving_arm(hosts, request.node.name, is_relayed=False) as made:
        yield made


@pytest.fixture
def relayed(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Cell]:
    with moving_arm(hosts, request.node.name, is_relayed=True) as made:
        yield made


def assert_still(cell: Cell, since: int) -> ArmState:
    """Check that the arm stood still two control periods after a tick at the latest; return its state."""
    state = cell.state()
    assert state.still_tick is not None
    assert state.still_tick <= since + STOP_PERIODS
    return state


def assert_left(cell: Cell, since: int) -> None:
    """Check the same of an arm whose holder is gone, and that it is free for others and stays where it is."""
    until(lambda: cell.state().holder is None, "the lease to end", seconds=30)
    state = assert_still(cell, since)
    assert state.still_tick is not None
    assert state.still_tick <= state.heard_tick + STOP_PERIODS
    assert "process" in str(state.stopped)
    assert "robot0" in str(state.stopped)
    np.testing.assert_array_equal(cell.state().joints, state.joints)


def test_an_arm_whose_cable_is_pulled_stands_still(cell: Cell) -> None:
    with cell.pc.unplugged():
        assert_left(cell, cell.state().tick)
        until(lambda: cell.count("ended") == 1, "what the holder is told", seconds=30)
    said = cell.last("ended")
    assert cell.name in said
    assert f"no response within {CALL_SECONDS:g} s" in said
    assert "check the controller and the cable" in said
    cell.check_recordings()


@pytest.mark.parametrize("end", ["says goodbye", "says nothing"])
def test_an_arm_whose_pc_is_gone_stands_still(cell: Cell, end: str) -> None:
    if end == "says nothing":  # as without power; a kernel that ends its connections would
        cell.pc.link("down")
    since = cell.state().tick
    cell.pc.kill()
    try:
        assert_left(cell, since if end == "says nothing" else cell.state().tick)
        cell.check_recordings()
    finally:
        cell.pc.restart()


def test_an_action_that_a_loose_cable_delays_is_not_carried_out(cell: Cell) -> None:
    with cell.pc.unplugged():
        since = cell.state().tick
        # What is sent now is lost, and comes when it is sent once more: the lease lasts longer than that.
        until(lambda: cell.state().tick > since + 3 * STOP_PERIODS, "the arm's clock to go on")
        assert_still(cell, since)
    until(lambda: cell.count("late") or cell.count("ended"), "what the holder is told", seconds=30)
    said = cell.last("late")
    assert cell.name in said
    assert "check the link between this node and the controller" in said
    moved = cell.count("moved")
    until(lambda: cell.count("moved") > moved, "the arm to go on", seconds=30)
    cell.check_recordings()


def test_over_a_slow_link_nothing_is_carried_out(relayed: Cell) -> None:
    assert relayed.relay.ask("0.12") == "ready\n"  # in each direction alone more than the 100 ms that are allowed
    since = relayed.state().tick
    until(lambda: relayed.count("late") >= 5, "what the holder is told", seconds=30)
    # What was on its way when the link became slow came in time.
    state = assert_still(relayed, since)
    assert state.tick > since + STOP_PERIODS
    assert relayed.name in relayed.last("late")
    assert "100 are allowed" in relayed.last("late")
    moved = relayed.count("moved")
    assert relayed.relay.ask("0") == "ready\n"
    until(lambda: relayed.count("moved") > moved + 5, "the arm to go on", seconds=30)
    relayed.check_recordings()


def test_after_each_of_ten_random_delays_the_arm_goes_on(relayed: Cell) -> None:
    random = np.random.default_rng(0)
    for _ in range(10):
        before = relayed.count("moved")
        relayed.relay.ask(f"{random.uniform(0.11, 0.5):.3f}")
        since = relayed.state().tick
        until(lambda since=since: relayed.state().tick > since + 20, "the arm's clock to go on")
        assert_still(relayed, since)
        relayed.relay.ask("0")
        until(lambda before=before: relayed.count("moved") > before + 3, "the arm to go on", seconds=30)
    relayed.check_recordings()
