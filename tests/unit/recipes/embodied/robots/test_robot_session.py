"""The checks before an arm moves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from recipes.embodied.cameras.camera import CameraError
from recipes.embodied.robots.controller.controller import VERSION
from recipes.embodied.robots.controller.simulated_arm import SimulatedArm
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import (
    CONTROL_SECONDS,
    is_within,
    points_within,
    reach_target,
    start_within,
)
from recipes.embodied.robots.franka_kinematics import HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.robot_errors import RobotCheckError
from recipes.embodied.robots.robot_session import (
    ArmCheck,
    check_cameras,
    check_latency,
    check_lease,
    check_limits,
    check_version,
    check_workspace,
    refuse_faults,
    watch_cameras,
)
from recipes.embodied.robots.wire_protocol import ArmState, Box, ControllerFacts
from rlinf_core import ConfigError
from rlinf_core.hardware.robots.franka import Franka

CONTROLLER = SimulatedArm.name
FACTS = ControllerFacts.of(
    {
        "controller": CONTROLLER,
        "version": VERSION,
        "period": CONTROL_SECONDS,
        "limits": {"velocity": VELOCITY_MAX.tolist(), "low": JOINT_MIN.tolist(), "high": JOINT_MAX.tolist()},
    }
)
STATE = ArmState.of({"joints": HOME.tolist(), "target": HOME.tolist(), "cameras": {"c1": 0.01, "c2": 0.9}})


def arm(**fields: Any) -> Franka:
    return Franka.model_validate({"node_rank": 2, "robot_ip": "10.0.0.1", **fields})


class Stopped:
    """As much of a client as is needed."""

    where = "Franka arm 10.0.0.1:17310 of node 2"

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def workspace_of_the_page() -> list[list[float]]:
    """Return the workspace that docs/robots.md shows."""
    page = (Path(__file__).parents[5] / "docs/robots.md").read_text()
    (matches,) = re.findall(r"workspace: (\[\[.*?\]\])", page)
    return json.loads(matches)


SMALL = [[0.3, -0.02, 0.4], [0.6, 0.02, 0.6]]
TIGHT = [[0.306, -0.001, 0.486], [0.31, 0.5, 0.5]]


@pytest.mark.parametrize("workspace", [workspace_of_the_page(), SMALL, TIGHT, None])
def test_starts_and_points_are_within_the_workspace(workspace: Any) -> None:
    random = np.random.default_rng(0)
    simulated = SimulatedArm()
    simulated.workspace = None if workspace is None else Box(tuple(workspace[0]), tuple(workspace[1]))
    for _ in range(300):
        joints = start_within(random.random((7, 1)), workspace)
        assert simulated.inside(joints[:, 0])
        assert is_within(reach_target(random.random((3, 1)), workspace)[:, 0], workspace)


def test_starts_differ_where_there_is_room() -> None:
    draws = np.random.default_rng(0).random((2, 7, 1))
    wide = workspace_of_the_page()
    assert np.array_equal(start_within(draws[0], wide), start_within(draws[0], None))
    assert not np.array_equal(start_within(draws[0], SMALL), start_within(draws[1], SMALL))


def test_a_workspace_without_points_is_refused() -> None:
    with pytest.raises(ConfigError, match="no point of the task `reach` is in the arm's `workspace`"):
        points_within([[0.65, -0.3, 0.1], [0.7, 0.3, 0.5]])


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        (CONTROLLER, "3.0", "ok"),
        (CONTROLLER, "3.7.1", "ok"),
        (CONTROLLER, "2.9", "fault"),
        (CONTROLLER, "4.0", "fault"),
        (CONTROLLER, "newest", "fault"),
        ("my-lab", "1", "skipped"),
    ],
)
def test_the_version_is_one_that_was_tried(name: str, version: str, verdict: str) -> None:
    assert check_version(FACTS.model_copy(update={"controller": name, "version": version})).verdict == verdict


def test_link_is_judged_by_the_slowest_answer_of_its_best_round() -> None:
    good, bad = [0.001] * 100, [0.001] * 90 + [0.2] * 10
    assert check_latency([bad, good, bad], CONTROL_SECONDS).verdict == "ok"
    result = check_latency([bad, bad], CONTROL_SECONDS)
    assert result.verdict == "fault"
    assert "200.0 ms" in result.message
    assert "50 ms" in result.message


def test_the_controller_must_not_allow_more_than_the_arm_can() -> None:
    assert check_limits(FACTS).verdict == "ok"
    wider = tuple(1.1 * VELOCITY_MAX)
    assert "velocities" in check_limits(FACTS.model_copy(update={"velocity": wider})).message
    assert "lower" in check_limits(FACTS.model_copy(update={"low": tuple(JOINT_MIN - 0.1)})).message
    assert "upper" in check_limits(FACTS.model_copy(update={"high": tuple(JOINT_MAX + 0.1)})).message
    assert check_limits(FACTS.model_copy(update={"high": tuple(JOINT_MAX - 0.1)})).verdict == "ok"
    assert "0.001 s" in check_limits(FACTS.model_copy(update={"period": 0.001})).message


def test_workspace_cameras_and_lease() -> None:
    hand = hand_pose(HOME[:, None])[0][:, 0]
    around = [(hand - 0.1).tolist(), (hand + 0.1).tolist()]
    assert check_workspace(arm(), STATE).verdict == "skipped"
    assert check_workspace(arm(workspace=around), STATE).verdict == "ok"
    beside = [(hand + 0.1).tolist(), (hand + 0.2).tolist()]
    assert check_workspace(arm(workspace=beside), STATE).verdict == "fault"
    there = STATE.model_copy(update={"joints": HOME + 0.5})
    hand = hand_pose(there.joints[:, None])[0][:, 0]
    result = check_workspace(arm(workspace=[(hand - 0.05).tolist(), (hand + 0.05).tolist()]), there)
    assert result.verdict == "fault"
    assert "at the arm's home the hand is at [0.307, 0.0, 0.487] m" in result.message
    assert check_cameras(arm(), STATE).verdict == "skipped"
    assert check_cameras(arm(camera_serials=["c1"]), STATE).verdict == "ok"
    assert "c2 has taken no frame for 0.9 s" in check_cameras(arm(camera_serials=["c1", "c2"]), STATE).message
    assert "c3 is not connected" in check_cameras(arm(camera_serials=["c3"]), STATE).message
    assert check_lease(FACTS).verdict == "ok"
    assert "process 7" in check_lease(FACTS.model_copy(update={"holder": "process 7"})).message


def test_all_faults_are_told_at_once_with_arm_and_remedies() -> None:
    client = cast("FrankaClient", Stopped())
    good = ArmCheck("controller", "ok", "fine")
    refuse_faults(client, [good])
    faults = [ArmCheck("link", "fault", "slow", "use a cable"), ArmCheck("cameras", "fault", "gone", "plug it in")]
    with pytest.raises(RobotCheckError, match="link: slow; cameras: gone") as caught:
        refuse_faults(client, [good, *faults])
    assert "10.0.0.1:17310 of node 2" in str(caught.value)
    assert "use a cable; plug it in" in str(caught.value.help)


def test_a_camera_that_freezes_stops_the_arm() -> None:
    stub = Stopped()
    client = cast("FrankaClient", stub)
    watch_cameras(client, arm(camera_serials=["c1"]), STATE)
    watch_cameras(client, arm(camera_serials=["c2"], disable_validate=True), STATE)
    assert not stub.stops
    with pytest.raises(CameraError, match="c2 has taken no frame") as caught:
        watch_cameras(client, arm(camera_serials=["c2"]), STATE)
    assert stub.stops == 1
    assert "10.0.0.1:17310 of node 2" in str(caught.value)


@pytest.mark.parametrize(
    "box", [[[0, 0, 0], [0, 1, 1]], [[0, 0], [1, 1]], [[0, 0, 0]], [[0, 0, 0], [1, 1, float("inf")]]]
)
def test_a_workspace_has_room(box: Any) -> None:
    with pytest.raises(ValueError, match="workspace"):
        arm(workspace=box)


def test_a_workspace_is_two_points() -> None:
    workspace = arm(workspace=[[0.3, -0.3, 0], [0.7, 0.3, 0.5]]).workspace
    assert workspace is not None
    assert np.array(workspace).shape == (2, 3)
