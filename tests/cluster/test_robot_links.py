"""Faults between a robot's PC and the controller of its arm, which are two machines: the arm stands still in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipes.embodied.replay.segments import read_segments
from recipes.embodied.robots.replies import ArmState
from tests.cluster.host import Host
from tests.cluster.hosts import Hosts
from tests.waiting import until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(300)]

PORT = 17310
STOP_PERIODS = 2
WATCH = """
import json, sys
from recipes.embodied.robots.client import FrankaClient
from rlinf_core.hardware.robots.franka import Franka

client = FrankaClient(Franka(node_rank=0, robot_ip=sys.argv[1], robot_port=int(sys.argv[2])))
for _ in sys.stdin:
    print(json.dumps(client._request("state")), flush=True)
"""


class Cell:
    """An arm's controller on `render0`, its holder on `robot0`, and a watcher beside the controller."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.controller, self.pc, self.folder = hosts["render0"], hosts["robot0"], folder
        self.told: list[str] = []
        self._started: list[subprocess.Popen[str]] = []
        address = self.controller.address
        listening = self._start(
            self.controller,
            ["-m", "recipes.embodied.robots.simulated_controller", "--host", address, "--port", str(PORT)],
        )
        assert listening.stdout is not None
        assert listening.stdout.readline().startswith("listening on ")
        self._watcher = self._start(self.controller, ["-c", WATCH, address, str(PORT)])
        holder = self._start(self.pc, ["-m", "tests.cluster.robot_holder", address, str(PORT), str(folder)])
        self._reader = threading.Thread(target=self._read, args=(holder,), daemon=True)
        self._reader.start()
        until(lambda: self.count("moved") >= 20, "the arm to be moved", seconds=60)

    def state(self) -> ArmState:
        """Return the controller's own record, asked for on its machine."""
        assert self._watcher.stdin is not None
        assert self._watcher.stdout is not None
        self._watcher.stdin.write("\n")
        self._watcher.stdin.flush()
        return ArmState.of(json.loads(self._watcher.stdout.readline()))

    def count(self, word: str) -> int:
        return sum(line.startswith(word) for line in list(self.told))

    def check_recordings(self) -> None:
        """Compare what is on disk with what the holder told of before the fault, to the bit."""
        told = [line.split()[1] for line in list(self.told) if line.startswith("moved ")]
        found = [record["joints"].tobytes().hex() for record in read_segments(self.folder)]
        assert len(told) >= 20
        # The last one may have been recorded and not told, where the holder was killed in between.
        assert found[: len(told)] == told
        assert len(found) <= len(told) + 1

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(timeout=30)
        for host in (self.controller, self.pc):
            if host.alive:
                for pid, words in host.processes().items():
                    if "robots.simulated_controller" in words or "robot_holder" in words:
                        host.run(["kill", "-KILL", str(pid)], check=False)

    def _start(self, host: Host, words: list[str]) -> subprocess.Popen[str]:
        process = host.spawn(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        self._started.append(process)
        return process

    def _read(self, holder: subprocess.Popen[str]) -> None:
        assert holder.stdout is not None
        self.told.extend(holder.stdout)


@pytest.fixture
def cell(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Cell]:
    # In the hosts' folder, which all of them see.
    folder = hosts.folder / "recordings" / request.node.name
    folder.mkdir(parents=True)
    made = Cell(hosts, folder)
    try:
        yield made
    finally:
        made.end()


def assert_still(cell: Cell, since: int) -> ArmState:
    """Return the state of an arm that was free in the end, and stood still two periods after a tick at the latest."""
    until(lambda: cell.state().holder is None, "the lease to end", seconds=30)
    state = cell.state()
    assert state.still_tick is not None
    assert state.still_tick <= since + STOP_PERIODS
    assert "process" in str(state.stopped)
    assert "robot0" in str(state.stopped)
    np.testing.assert_array_equal(cell.state().joints, state.joints)
    return state


def test_an_arm_whose_cable_is_pulled_stands_still(cell: Cell) -> None:
    with cell.pc.unplugged():
        state = assert_still(cell, cell.state().tick)
        until(lambda: cell.count("ended") == 1, "what the holder is told", seconds=30)
    assert state.still_tick is not None
    assert state.still_tick <= state.heard_tick + STOP_PERIODS
    said = cell.told[-1]
    assert f"Franka arm {cell.controller.address}:{PORT} of node 4" in said
    assert "no answer within 1 s" in said
    assert "check the controller and the cable" in said
    cell.check_recordings()


def test_an_arm_whose_pc_loses_power_stands_still(cell: Cell) -> None:
    cell.pc.link("down")  # nothing says goodbye
    since = cell.state().tick
    cell.pc.kill()
    try:
        state = assert_still(cell, since)
        assert state.still_tick is not None
        assert state.still_tick <= state.heard_tick + STOP_PERIODS
        cell.check_recordings()
    finally:
        cell.pc.restart()


def test_an_action_that_comes_late_over_a_loose_cable_is_not_carried_out(cell: Cell) -> None:
    before = cell.count("late")
    with cell.pc.unplugged():
        since = cell.state().tick
        # What is sent now is lost, and comes when it is sent once more: the lease lasts longer than that.
        until(lambda: cell.state().tick > since + 3 * STOP_PERIODS, "the arm's clock to go on")
        state = cell.state()
    assert state.still_tick is not None
    assert state.still_tick <= since + STOP_PERIODS
    until(lambda: cell.count("late") > before or cell.count("ended"), "what the holder is told", seconds=30)
    said = next(line for line in reversed(cell.told) if line.startswith("late"))
    assert f"Franka arm {cell.controller.address}:{PORT} of node 4" in said
    assert "look at the link between this node and the controller" in said
    cell.check_recordings()
