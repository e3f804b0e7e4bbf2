"""Devices of people: what their reports mean, when a takeover begins and ends, how they are lost. None is attached."""

from __future__ import annotations

import os
import struct
import sys
import termios
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.embodied.config.intervention_types import (
    GamepadOptions,
    KeyboardOptions,
    LeaderOptions,
    PersonOptions,
    SpaceMouseOptions,
)
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.real.so101 import LeaderSource, SO101Driver
from recipes.embodied.envs.registry import make_env
from recipes.embodied.envs.simulators.gym_hil import GymHilEnv
from recipes.embodied.interventions import event_device
from recipes.embodied.interventions.event_device import (
    LEFT_TRIGGER,
    LEFT_X,
    LEFT_Y,
    RIGHT_SHOULDER,
    RIGHT_TRIGGER,
    RIGHT_X,
    SELECT,
    SOUTH,
    START,
    GamepadSource,
    GamepadState,
    InputEvent,
    SpaceMouseSource,
    SpaceMouseState,
)
from recipes.embodied.interventions.intervention import STILL, HandMotion, InterventionError, SuccessJudge
from recipes.embodied.interventions.keyboard import KeyboardSource, Terminal, controls_of
from recipes.embodied.interventions.person import Controls, Engagement, PersonSource
from recipes.embodied.interventions.registry import open_judge, open_source
from rlinf_core import ConfigError
from rlinf_core.hardware.robots import SO101
from tests.known import known
from tests.unit.recipes.embodied.conftest import CountingEnv
from tests.unit.recipes.embodied.robots import fake_motors
from tests.unit.recipes.embodied.robots.fake_motors import FeetechMotorsBus
from tests.waiting import until

FAST = {"hz": 1000.0}


def one_env(**settings: Any) -> Any:
    env = make_env("franka_kin", EnvSettings(num_envs=1, **settings))
    env.reset()
    return env


class TestEngagement:
    def test_person_acts_from_first_motion_until_some_idle_steps(self) -> None:
        engagement = Engagement(PersonOptions(release_steps=2))
        moves = [0.0, 0.05, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        acts = [engagement.step(Controls((x, 0, 0))) is not None for x in moves]
        assert acts == [False, False, True, True, True, False, False, True]

    def test_a_button_takes_over_without_a_motion(self) -> None:
        engagement = Engagement(PersonOptions(release_steps=0))
        held = engagement.step(Controls(engaged=True))
        assert known(held).linear == (0, 0, 0)
        assert engagement.step(Controls()) is None
        gripped = engagement.step(Controls(toggles_gripper=True))
        assert known(gripped).gripper_closed
        assert engagement.step(Controls(verdict="success")) is None

    def test_axes_are_scaled_beyond_the_dead_band_and_inverted(self) -> None:
        options = PersonOptions(deadband=0.2, speed=0.5, signs=(1, -1, 1, 1, 1, 1))
        motion = Engagement(options).step(Controls((0.6, 1.0, -1.0), (0.1, 0, 2.0)))
        assert motion is not None
        assert motion.linear == pytest.approx((0.25, -0.5, -0.5))
        assert motion.angular == pytest.approx((0, 0, 0.5))

    def test_an_episode_begins_with_an_open_gripper_and_the_policy(self) -> None:
        engagement = Engagement(PersonOptions())
        engagement.step(Controls((1, 0, 0), toggles_gripper=True))
        engagement.begin()
        assert engagement.step(Controls()) is None
        assert not engagement.gripper_closed


class Scripted(PersonSource):
    def __init__(self, env: Any, *controls: Controls) -> None:
        super().__init__(env, PersonOptions(hz=1000))
        self.controls = list(controls)

    def poll(self) -> Controls:
        return self.controls.pop(0) if self.controls else Controls()


def test_a_person_moves_the_one_environment_of_a_worker() -> None:
    env = one_env()
    env.intervention = Scripted(env, Controls(), Controls((0, 0, 1)), Controls(verdict="failure"))
    policy = np.full((1, 1, 8), 0.125, np.float32)
    assert env.step(policy).executed.tolist() == policy.tolist()
    height = env._hand[2, 0]
    lifted = env.step(policy)
    assert lifted.interventions.all()
    assert env._hand[2, 0] > height
    ended = env.step(policy)
    assert ended.terminations.all()
    with pytest.raises(ConfigError, match="a person controls one environment, but this worker has 2"):
        Scripted(CountingEnv(EnvSettings(num_envs=2)))


def gripping(*commands: float) -> Any:
    """Return an arm whose gripper the policy has given these commands, one in each step, and the last one's action."""
    env = one_env(task="pick")
    env.intervention = Scripted(env)
    for command in commands:
        env.step(np.array([[[0.0] * 7 + [command]]], np.float32))
    return env


class TestTakeoverOfAGripper:
    @pytest.mark.parametrize("begin", [Controls((0, 0, 1)), Controls(engaged=True), Controls(angular=(0, 0, 1))])
    @pytest.mark.parametrize(("commands", "closed"), [((), False), ((1, 0), True), ((1, 0, -1, 0), False)])
    def test_the_gripper_stays_as_the_policy_left_it(
        self, begin: Controls, commands: tuple[float, ...], closed: bool
    ) -> None:
        env = gripping(*commands)
        env.intervention.controls = [begin] * 2
        for _ in range(8):  # the person's steps, and the rest of the takeover
            env.step(np.zeros((1, 1, 8), np.float32))
            assert env._closed[0] == closed

    def test_the_first_press_opens_what_the_policy_closed(self) -> None:
        env = gripping(1, 0)
        env.intervention.controls = [Controls(toggles_gripper=True), Controls((0, 0, 1))]
        for _ in range(2):
            assert env.step(np.zeros((1, 1, 8), np.float32)).executed[0, 0, 7] == -1

    def test_another_takeover_starts_from_the_policys_gripper(self) -> None:
        env = gripping()
        source = env.intervention
        source.controls = [Controls(toggles_gripper=True), *[Controls()] * 6, *[Controls()] * 2, Controls((0, 0, 1))]
        for _ in range(7):
            env.step(np.zeros((1, 1, 8), np.float32))
        assert env._closed[0]
        for _ in range(2):
            env.step(np.array([[[0.0] * 7 + [-1.0]]], np.float32))
        env.step(np.zeros((1, 1, 8), np.float32))
        assert not env._closed[0]


def test_a_number_between_open_and_closed_is_repeated() -> None:
    motion = HandMotion((0, 0, 1), STILL, gripper_closed=True, moves_gripper=False)
    assert motion.action(7, np.full(7, 0.375)).tolist() == [0, 0, 1, 0, 0, 0, 0.375]
    assert motion._replace(moves_gripper=True).action(7, np.full(7, 0.375)).tolist() == [0, 0, 1, 0, 0, 0, 1]
    steered: Any = GymHilEnv.steer
    hil = SimpleNamespace(action_size=4, executed_actions=np.ones((1, 4)))
    assert steered(hil, motion, 0).tolist() == [0, 0, 1, 0]  # each number would close it further


def test_a_demonstration_waits_for_the_person() -> None:
    env = one_env()
    source = Scripted(env, Controls(), Controls(), Controls((1, 0, 0)), Controls((0, 1, 0)))
    source.wait_for_person()
    assert source.controls == [Controls((0, 1, 0))]


def test_keys() -> None:
    assert controls_of({"w", "a"}, set()) == Controls((1, 1, 0))
    assert controls_of({"w", "s"}, {"space"}) == Controls(toggles_gripper=True)
    assert controls_of(set(), {"enter"}).verdict == "success"
    assert controls_of(set(), {"backspace"}).verdict == "failure"
    assert controls_of({"tab"}, set()).engaged


class TestTerminal:
    def test_typed_keys_move_and_the_terminal_gets_its_settings_back(self) -> None:
        person, terminal = os.openpty()
        before = termios.tcgetattr(terminal)
        keyboard = Terminal(os.ttyname(terminal))
        os.write(person, b"wW\tq")
        result: set[str] = set()
        until(lambda: result.update(keyboard.read()) or "tab" in result, pause=0.0)
        assert result == {"w", "tab"}
        assert keyboard.read() == set()
        assert termios.tcgetattr(terminal) != before
        keyboard.close()
        keyboard.close()
        assert termios.tcgetattr(terminal) == before
        os.close(person)
        os.close(terminal)

    def test_a_worker_has_none(self) -> None:
        with pytest.raises(InterventionError, match="no terminal") as caught:
            Terminal("/nowhere")
        assert "`source: browser`" in str(caught.value.help)


class FakeInput:
    """As `evdev.InputDevice`."""

    def __init__(self, path: str) -> None:
        if "gone" in path:
            raise OSError(2, "No such file or directory")
        self.path, self.events = path, list[Any]()
        self.lost = self.closed = False

    def capabilities(self) -> dict[int, list[int]]:
        return {1: [SOUTH]} if "pad" in self.path else {1: [30]}

    def absinfo(self, axis: int) -> Any:
        if axis == 16:
            raise OSError(22, "Invalid argument")
        return SimpleNamespace(min=0 if axis in (2, 5) else -32768, max=255 if axis in (2, 5) else 32767)

    def read_one(self) -> Any:
        if self.lost:
            raise OSError(19, "No such device")
        return self.events.pop(0) if self.events else None

    def put(self, kind: int, code: int, value: int) -> None:
        self.events.append(SimpleNamespace(type=kind, code=code, value=value))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def evdev(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(InputDevice=FakeInput, list_devices=lambda: ["/dev/input/kbd", "/dev/input/pad"])
    monkeypatch.setitem(sys.modules, "evdev", module)
    return module


class TestGamepad:
    def test_sticks_triggers_and_buttons(self) -> None:
        state = GamepadState({LEFT_X: (-100, 100), LEFT_Y: (-100, 100), RIGHT_X: (0, 200), RIGHT_TRIGGER: (0, 255)})
        state.change(InputEvent(False, LEFT_Y, -100))
        state.change(InputEvent(False, LEFT_X, 50))
        state.change(InputEvent(False, RIGHT_X, 100))
        state.change(InputEvent(False, RIGHT_TRIGGER, 255))
        state.change(InputEvent(False, LEFT_TRIGGER, 255))  # no such axis on this device
        state.change(InputEvent(True, SOUTH, 1))
        state.change(InputEvent(True, SOUTH, 0))
        state.change(InputEvent(True, RIGHT_SHOULDER, 1))
        first = state.take()
        assert first.linear == pytest.approx((1, -0.5, 1))
        assert first.angular == pytest.approx((0, 0, 0))
        assert first.toggles_gripper
        assert first.engaged
        second = state.take()
        assert not second.toggles_gripper
        assert second.engaged
        for button, verdict in ((START, "success"), (SELECT, "failure")):
            state.change(InputEvent(True, button, 1))
            assert state.take().verdict == verdict

    def test_the_only_one_is_found_and_its_loss_is_told(self, evdev: Any) -> None:
        source = GamepadSource(one_env(), GamepadOptions(**FAST))
        device = source._device._device
        assert device.path == "/dev/input/pad"
        device.put(3, LEFT_Y, -32768)
        device.put(0, 0, 0)
        assert source.poll().linear[0] == pytest.approx(1)
        device.lost = True
        with pytest.raises(InterventionError, match="disconnected") as caught:
            source.poll()
        assert "/dev/input/pad" in str(caught.value)
        source.close()
        assert device.closed

    def test_none_several_or_an_unreadable_one(self, evdev: Any) -> None:
        env = one_env()
        evdev.list_devices = list
        with pytest.raises(InterventionError, match="no gamepad"):
            GamepadSource(env, GamepadOptions())
        evdev.list_devices = lambda: ["/dev/pad1", "/dev/pad2", "/dev/gone"]
        with pytest.raises(InterventionError, match="there are 2 gamepads"):
            GamepadSource(env, GamepadOptions())
        with pytest.raises(InterventionError, match="cannot be opened"):
            GamepadSource(env, GamepadOptions(device="/dev/gone"))


def test_a_keyboard_by_its_file_tells_releases(evdev: Any) -> None:
    source = KeyboardSource(one_env(), KeyboardOptions(device="/dev/input/kbd"))
    device = known(source._events)._device
    device.put(1, 17, 1)  # w
    device.put(1, 57, 1)  # space
    assert source.poll() == Controls((1, 0, 0), toggles_gripper=True)
    device.put(1, 17, 2)
    assert source.poll() == Controls((1, 0, 0))
    device.put(1, 17, 0)
    device.put(1, 57, 0)
    assert source.poll() == Controls()
    source.close()


class FakeHid:
    """As `hid.device`."""

    def __init__(self) -> None:
        self.reports: list[list[int]] = []
        self.lost = self.closed = False

    def open_path(self, path: bytes) -> None:
        if path == b"locked":
            raise OSError("open failed")

    def set_nonblocking(self, on: int) -> None:
        assert on

    def read(self, size: int) -> list[int]:
        if self.lost:
            raise OSError("read error")
        return self.reports.pop(0) if self.reports else []

    def close(self) -> None:
        self.closed = True


def report_of(number: int, *counts: int) -> list[int]:
    return [number, *struct.pack(f"<{len(counts)}h", *counts)]


class TestSpaceMouse:
    @pytest.mark.parametrize(
        "reports", [[report_of(1, 350, -175, 0, 0, 0, -350)], [report_of(1, 350, -175, 0), report_of(2, 0, 0, -350)]]
    )
    def test_both_kinds_of_reports(self, reports: list[list[int]]) -> None:
        state = SpaceMouseState()
        for report in reports:
            state.change(report)
        result = state.take()
        # To the right and forward; turned against the clock as seen from above.
        assert result.linear == pytest.approx((0.5, -1, 0))
        assert result.angular == pytest.approx((0, 0, 1))

    def test_buttons(self) -> None:
        state = SpaceMouseState()
        state.change([3, 1])
        state.change([3, 0])
        assert state.take().toggles_gripper
        assert not state.take().toggles_gripper
        state.change([3, 2])
        assert state.take().engaged
        assert state.take().engaged
        state.change([])
        state.change([1, 0])  # too short to mean anything
        assert state.take().linear == (0, 0, 0)

    def test_it_is_found_by_its_vendor_and_its_loss_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeHid()
        mouse = {"vendor_id": 0x046D, "product_id": 0xC077, "path": b"mouse"}  # an ordinary mouse of the old vendor
        cap = {"vendor_id": 0x256F, "product_id": 0xC635, "path": b"cap", "serial_number": "A1"}
        module = SimpleNamespace(device=lambda: device, enumerate=lambda: [mouse, cap, dict(cap)])
        monkeypatch.setitem(sys.modules, "hid", module)
        source = SpaceMouseSource(one_env(), SpaceMouseOptions(**FAST))
        device.reports += [report_of(1, 0, -350, 0), [3, 1]]
        assert source.poll() == Controls((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), toggles_gripper=True)
        device.lost = True
        with pytest.raises(InterventionError, match="spacemouse A1: the device disconnected"):
            source.poll()
        source.close()
        assert device.closed
        with pytest.raises(InterventionError, match="no SpaceMouse"):
            event_device._found(module, "B2")
        module.enumerate = lambda: [cap, {**cap, "path": b"other", "serial_number": "B2"}]
        with pytest.raises(InterventionError, match="there are 2 SpaceMouse devices"):
            event_device._found(module, None)
        cap["path"] = b"locked"
        with pytest.raises(InterventionError, match="cannot be opened"):
            SpaceMouseSource(one_env(), SpaceMouseOptions(serial="A1"))


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_motors.install(monkeypatch)
    monkeypatch.setattr(SO101Driver, "control_hz", 2000.0)


@pytest.fixture
def env() -> Any:
    arm = SO101(node_rank=0, device="/dev/arm", options={"noise": 0, "lead": 90})
    made = make_env("robot", EnvSettings(num_envs=1, hardware=(arm,), max_episode_steps=10_000))
    made.reset()
    yield made
    made.close()


def leader(env: Any, **options: Any) -> LeaderSource:
    made = LeaderSource(env, LeaderOptions(device="/dev/leader", **options))
    FeetechMotorsBus.made[-1].at.update(dict.fromkeys(fake_motors.JOINTS, 0.0), gripper=50.0)
    while made.read() is not None:  # it was turned to the arm's pose
        pass
    return made


def turn(joint: str, by: float) -> None:
    """Turn a joint of the leader by hand."""
    FeetechMotorsBus.made[-1].at[joint] += by


def step(env: Any, source: LeaderSource) -> Any:
    """Take a step as an environment with this source does; the policy would stand still."""
    takeover = source.read()
    action = np.zeros((1, 1, 6), np.float32) if takeover is None else takeover.actions[:, None]
    env.step(action)
    return takeover


def test_arm_follows_the_leader_and_the_policy_acts_after_it(env: Any) -> None:
    source = leader(env, release_steps=3)
    assert not FeetechMotorsBus.made[-1].torque  # it is moved by hand
    turn("shoulder_pan", 5)
    turn("gripper", 10)
    taken = [step(env, source) is not None for _ in range(400)]
    last = len(taken) - taken[::-1].index(True)
    assert all(taken[:last])
    assert not any(taken[last:])
    goals = FeetechMotorsBus.made[0].goal
    assert goals["shoulder_pan"] == pytest.approx(5, abs=1.1)
    assert goals["gripper"] == pytest.approx(60, abs=1.1)


def test_a_joint_that_is_not_moved_stays_where_the_arm_has_it(env: Any) -> None:
    source = leader(env)
    for _ in range(200):
        env.step(np.array([[[0, 0, 0, 0, 0, -1]]], np.float32))  # the policy closes the gripper on something
    held = FeetechMotorsBus.made[0].goal["gripper"]
    turn("gripper", held + 10 - FeetechMotorsBus.made[-1].at["gripper"])
    source.read()
    source._engagement.begin()
    turn("shoulder_pan", 5)
    taken = [step(env, source) is not None for _ in range(300)]
    assert any(taken)
    assert FeetechMotorsBus.made[0].goal["shoulder_pan"] == pytest.approx(5, abs=1.1)
    assert FeetechMotorsBus.made[0].goal["gripper"] == pytest.approx(held, abs=0.2)
    turn("gripper", 5)
    for _ in range(400):
        step(env, source)
    assert FeetechMotorsBus.made[0].goal["gripper"] == pytest.approx(held + 15, abs=1.1)


def test_leader_far_from_the_arm_does_not_take_over(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = leader(env, align=10)
    turn("elbow_flex", 40)
    assert source.read() is None
    assert "leader arm at /dev/leader is too far" in caplog.text
    assert "elbow_flex by -40" in caplog.text
    turn("elbow_flex", -35)
    assert source.read() is not None
    turn("elbow_flex", 60)  # who is in charge may be as fast as they like
    assert source.read() is not None


def test_unplugged_leader_is_named(env: Any) -> None:
    source = leader(env)
    FeetechMotorsBus.made[-1].gone = True
    with pytest.raises(InterventionError, match="leader arm at /dev/leader: the arm's motors do not answer") as caught:
        source.read()
    assert "cable" in str(caught.value.help)
    source.close()
    with pytest.raises(InterventionError, match="do not answer"):
        LeaderSource(env, LeaderOptions(device="/dev/missing"))


def test_other_robots_have_no_leader() -> None:
    other = make_env("franka_kin", EnvSettings(num_envs=1))
    with pytest.raises(ConfigError, match="moves an SO-101, which this robot is not"):
        open_source("leader", other, {"device": "/dev/leader"})


def test_keys_judge_beside_a_leader_without_keys(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.intervention = leader(env)
    opened: list[str] = []

    class Keys:
        def read(self) -> Any:
            return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        "recipes.embodied.interventions.registry.open_source", lambda name, *_: opened.append(name) or Keys()
    )
    judge: SuccessJudge = open_judge("keys", env, {})
    assert judge.judge({}) == {}
    assert opened == ["keyboard"]
    judge.close()
