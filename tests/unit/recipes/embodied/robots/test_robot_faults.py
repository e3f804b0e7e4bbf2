"""Random faults: the arm stands still within two control periods, counted by the controller, and errors say what to do.

What was recorded before a fault is read again to the bit.

A holder, its link and a controller in time that is counted here, so that a busy machine changes nothing. Real
processes, sockets and kills are in tests/integration/recipes/robots.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import Damage, SegmentWriter, read_segments
from recipes.embodied.off_policy.segments import encode as encode_record
from recipes.embodied.robots.controller.arm import SimulatedArm, SimulatedCameras
from recipes.embodied.robots.controller.controller import Controller, Motion, to_tick
from recipes.embodied.robots.controller_client import SIGN_SECONDS
from recipes.embodied.robots.franka_arm import ACTION_STEP, HOME, JOINT_MAX, JOINT_MIN
from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLateError,
    RobotLeaseError,
    RobotRefusedError,
    RobotSilentError,
    RobotStoppedError,
    refusal_error,
)
from recipes.embodied.robots.robot_session import FRAME_AGE
from recipes.embodied.robots.wire_protocol import ControllerRequest, Message, ProtocolError, decode, encode, request_of

HOLDER, WATCHER = 1, 2
LINK: Final = 0.002  # seconds that a message takes on a good link
FAULTS: Final = (
    "killed",
    "power lost",
    "frozen process",
    "cut link",
    "delayed link",
    "not a number",
    "too large",
    "late action",
    "frozen camera",
    "a person stops it",
    "another job",
)
WHERE = "Franka arm 10.0.0.1:17310 of node 2"
START = (HOME + 0.4).clip(JOINT_MIN, JOINT_MAX)


class World:
    """A holder that resets its arm and then moves it at every control period, until something goes wrong.

    Args:
        fault: one of `FAULTS`.
        random: for its moment and its kind.
        folder: new one for what the holder records.

    Attributes:
        recorded: joints and controller's tick of each motion, as they were written.
        since: moment from which on two control periods are counted.
        refusals: what the holder was told.
        intruder: what a second job was told.
        held: who held the arm when the holder was killed.
    """

    def __init__(self, fault: str, random: np.random.Generator, folder: Path) -> None:
        self.fault, self.random = fault, random
        self.cameras = SimulatedCameras(["c1"])
        self.controller = Controller(SimulatedArm(), self.cameras)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.broken_at = float(random.uniform(0.1, 6.0))
        self.since: float | None = None
        self.refusals: list[Message] = []
        self.intruder: list[Message] = []
        self.held: str | None = None
        self.connected = self.alive = True
        self.delay = LINK
        self.followed: tuple[float, float] | None = None
        self.folder = folder
        self.recorder = SegmentWriter(folder)
        self.recorded: list[tuple[list[float], int]] = []

    def at(self, moment: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (moment, next(self.order), what))

    def run(self) -> Message:
        """Return the state some time after the fault."""
        self.at(0.0, self.begin)
        self.at(self.broken_at, self.break_)
        end = self.broken_at + 4.0
        while self.events and self.events[0][0] < end:
            moment, _, what = heapq.heappop(self.events)
            what(moment)
        state = self.controller.handle(WATCHER, ControllerRequest("state", 9, {}), end)
        assert isinstance(state, dict)
        if self.fault in ("killed", "power lost"):
            self.tear()
        return state

    # The holder

    def begin(self, now: float) -> None:
        self.send(now, "acquire", holder="process 71 on lab-3", heartbeat=2.0)
        self.at(now + SIGN_SECONDS, self.beat)
        self.at(now + 2 * LINK, lambda then: self.send(then, "reset", joints=START.tolist()))

    def beat(self, now: float) -> None:
        if self.alive:
            self.send(now, "beat")
            self.at(now + SIGN_SECONDS, self.beat)

    def act(self, now: float) -> None:
        """Send the next action, after the policy has thought for a moment."""
        if not self.alive:
            return
        deltas = self.random.uniform(-1, 1, 7) * ACTION_STEP[:, 0]
        output = {} if self.followed is None else {"after": self.followed[0], "waited": now - self.followed[1]}
        delay = self.delay
        if now >= self.broken_at and self.since is None:
            if self.fault == "not a number":
                deltas = np.full(7, np.nan)
            elif self.fault == "too large":
                deltas = 5 * deltas / np.abs(deltas / ACTION_STEP[:, 0]).max()
            elif self.fault == "late action":
                delay = float(self.random.uniform(0.11, 1.0))
            if self.fault in ("not a number", "too large", "late action"):
                self.since = now
                self.alive = self.fault == "late action"
        self.send(now, "move", delay, deltas=deltas.tolist(), close_gripper=None, **output)

    def hear(self, now: float, reply: Message) -> None:
        if not self.alive:
            return
        if reply.get("ok") is not True:
            self.refusals.append(reply)
            if self.fault in ("late action", "delayed link"):
                # One late action is told, and the policy goes on; in this world it has nothing more to say.
                self.alive = self.fault == "delayed link" and reply["code"] == "late"
            else:
                self.alive = False
        if reply.get("ok") is True and "clock" in reply:
            self.followed = reply["clock"], now
            self.record(reply)
            if reply["cameras"]["c1"] > FRAME_AGE and self.since is None:
                self.since, self.alive = now, False
                self.send(now, "stop")
                return
        self.at(now + float(self.random.uniform(0, 0.02)), self.act)

    def record(self, reply: Message) -> None:
        joints, tick = reply["joints"], reply["tick"]
        self.recorder.append({"joints": np.array(joints), "tick": np.array(tick)})
        self.recorded.append((joints, tick))

    def tear(self) -> None:
        """Leave the recording as a holder does that ends while it writes: with the beginning of one more record."""
        record = encode_record({"joints": np.ones(7), "tick": np.array(-1)})
        part = self.folder / f".segment-{len(self.recorded) + 1:08d}.rlr.71.abcd.part"
        part.write_bytes(record[: self.random.integers(1, len(record))])

    # The link

    def send(self, now: float, op: str, delay: float | None = None, **fields: Any) -> None:
        if self.connected:
            arrives = now + (self.delay if delay is None else delay)
            self.at(arrives, lambda then: self.arrive(then, {"op": op, "id": 1, **fields}))

    def arrive(self, now: float, message: dict[str, Any]) -> None:
        if not self.connected:
            return
        try:
            # What JSON has not is what a broken sender would send all the same.
            line = str(message).replace("'", '"').replace("nan", "NaN").replace("None", "null").encode() + b"\n"
            request = request_of(decode(line if self.fault == "not a number" else encode(message)))
            answer = self.controller.handle(HOLDER, request, now)
        except ProtocolError as error:
            self.connected = self.alive = False
            self.controller.lost(HOLDER, f"it sent {error}", now)
            return
        if isinstance(answer, Motion):
            self.follow(now, answer)
        elif answer is not None and request.op not in ("acquire", "stop"):
            self.reply(now, answer)

    def follow(self, now: float, motion: Motion) -> None:
        self.controller.expire(now)
        if self.controller.interrupted(motion) or self.controller.ended(motion, now):
            self.reply(now, self.controller.finish(motion, now))
        else:
            self.at(max(self.controller.due(motion, now), now + 1e-4), lambda then: self.follow(then, motion))

    def reply(self, now: float, message: Message) -> None:
        if self.connected:
            self.at(now + self.delay, lambda then: self.hear(then, message))

    # The faults

    def break_(self, now: float) -> None:
        if self.fault == "killed":
            self.kill(now)
        elif self.fault in ("power lost", "cut link"):
            self.since, self.alive, self.connected = now + LINK, False, False
        elif self.fault == "frozen process":
            self.since, self.alive = now + LINK, False
        elif self.fault == "delayed link":
            self.since, self.delay = now + LINK, float(self.random.uniform(0.15, 1.0))
        elif self.fault == "frozen camera":
            self.cameras.freeze("c1", now)
        elif self.fault == "a person stops it":
            self.since, self.alive = now, False
            self.controller.handle(WATCHER, ControllerRequest("stop", 3, {}), now)
        elif self.fault == "another job":
            self.intrude(now)

    def intrude(self, now: float) -> None:
        """Let a second job ask for the arm and move it; the first one goes on until it is killed, a moment later."""
        wanted: dict[str, Any] = {"holder": "process 8 on lab-4", "heartbeat": 2.0}
        for op, fields in (("acquire", wanted), ("reset", {"joints": HOME.tolist()}), ("release", {})):
            answer = self.controller.handle(WATCHER, ControllerRequest(op, 4, fields), now)
            assert isinstance(answer, dict), op
            if answer.get("ok") is not True:
                self.intruder.append(answer)
        self.at(now + 1.0, self.kill)

    def kill(self, now: float) -> None:
        self.since, self.alive, self.connected = now, False, False
        self.held = self.controller.holder
        self.controller.lost(HOLDER, "its connection was closed", now)


def check_recording(world: World) -> None:
    """Compare what is read with what was written, before and after the next holder has opened the recording."""
    damages: list[Damage] = []
    world.recorder.close()
    for _ in range(2):
        segments = read_segments(world.folder, damages.append)
        results = [(segment["joints"].tolist(), int(segment["tick"])) for segment in segments]
        assert results == world.recorded, (world.fault, damages)
        SegmentWriter(world.folder).close()
    assert not damages


def check(seed: int, fault: str, folder: Path) -> None:
    world = World(fault, np.random.default_rng([seed, FAULTS.index(fault)]), folder / str(seed))
    state = world.run()
    check_recording(world)
    if world.since is None:
        # It never came to that: a camera is looked at when a motion ends, and the reset was still under way.
        assert fault in ("frozen camera", "not a number", "too large", "late action"), (seed, fault)
        return
    assert state["still_tick"] is not None, (seed, fault)
    assert state["still_tick"] <= to_tick(world.since) + 2, (seed, fault, world.since, state)
    if fault in ("killed", "not a number", "frozen camera", "a person stops it"):
        assert state["stopped"], (seed, fault)
    if fault in ("power lost", "cut link", "frozen process"):
        assert state["holder"] is None  # the arm is free for the next one
        assert "process 71 on lab-3" in state["stopped"]
    if fault == "another job":
        assert world.held == "process 71 on lab-3", seed
        assert not world.refusals, seed
        assert [item["code"] for item in world.intruder[:2]] == ["busy", "no-lease"], seed
        assert "process 71 on lab-3" in str(world.intruder[0]["message"])
    for refusal in world.refusals + world.intruder:
        error = refusal_error(refusal, WHERE)
        assert WHERE in str(error)
        assert error.why, refusal
        assert error.help, refusal


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(1000, 1050), marks=pytest.mark.nightly)], ids=["few", "550 in all"]
)
def test_the_arm_stands_still_within_two_control_periods(fault: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        check(seed, fault, tmp_path)


def test_the_world_moves_its_arm_until_something_happens(tmp_path: Path) -> None:
    world = World("killed", np.random.default_rng(0), tmp_path)
    world.broken_at = 5.0
    world.run()
    # Most of the time the arm is moved: what is counted above begins while it is.
    assert world.controller._motion > 30
    assert not world.refusals
    assert len(world.recorded) > 30


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (("busy", "no-lease"), RobotLeaseError),
        (("stopped",), RobotStoppedError),
        (("silent",), RobotSilentError),
        (("late",), RobotLateError),
        (("refused",), RobotRefusedError),
    ],
)
def test_every_refusal_names_the_arm_the_cause_and_the_remedy(codes: tuple[str, ...], kind: type[RobotError]) -> None:
    for code in codes:
        error = refusal_error({"code": code, "message": "because"}, WHERE)
        assert (type(error), error.why, bool(error.help)) == (kind, "because", True)
        assert str(error).startswith(WHERE)
