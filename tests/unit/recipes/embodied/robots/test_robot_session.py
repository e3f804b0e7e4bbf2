"""The checks before an arm moves, where its hand is, and the views of a simulated one."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.embodied.cameras.drivers import ArmScene, CameraError, CameraSetup
from recipes.embodied.config.camera_config import CameraOptions
from recipes.embodied.envs.franka.pictures import SceneCamera
from recipes.embodied.robots.controller.arm import SimulatedArm
from recipes.embodied.robots.controller.controller import VERSION
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import (
    CONTROL_SECONDS,
    FINGERTIPS,
    FLANGE,
    HOME,
    JOINT_MAX,
    JOINT_MIN,
    VELOCITY_MAX,
    arm_points,
    hand_pose,
    is_within,
    points_on_hand,
    points_within,
    reach_target,
    start_within,
)
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
from rlinf_core.hardware.franka import Franka
from tests.known import known

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"high": tuple(JOINT_MAX - 0.1)}, None),
        ({"high": tuple(JOINT_MAX + 0.1)}, "upper"),
        ({"low": tuple(JOINT_MIN - 0.1)}, "lower"),
        ({"velocity": tuple(1.1 * VELOCITY_MAX)}, "velocities"),
        ({"period": 0.001}, "0.001 s"),
    ],
)
def test_the_controller_must_not_allow_more_than_the_arm_can(change: dict[str, Any], words: str | None) -> None:
    check = check_limits(FACTS.model_copy(update=change))
    assert check.verdict == ("ok" if words is None else "fault")
    assert (words or "") in check.message


def around(hand: Any, below: float, above: float) -> list[list[float]]:
    return [(hand + below).tolist(), (hand + above).tolist()]


def test_workspace_cameras_and_lease() -> None:
    hand = hand_pose(HOME[:, None])[0][:, 0]
    assert check_workspace(arm(), STATE).verdict == "skipped"
    assert check_workspace(arm(workspace=around(hand, -0.1, 0.1)), STATE).verdict == "ok"
    assert check_workspace(arm(workspace=around(hand, 0.1, 0.2)), STATE).verdict == "fault"
    there = STATE.model_copy(update={"joints": HOME + 0.5})
    hand = hand_pose(there.joints[:, None])[0][:, 0]
    result = check_workspace(arm(workspace=around(hand, -0.05, 0.05)), there)
    assert result.verdict == "fault"
    assert "at the arm's home the hand is at [0.307, 0.0, 0.487] m" in result.message
    for serials, said in (
        ([], "skipped"),
        (["c1"], "ok"),
        (["c1", "c2"], "c2 has taken no frame for 0.9 s"),
        (["c3"], "c3 is not connected"),
    ):
        check = check_cameras(arm(camera_serials=serials), STATE)
        assert said in f"{check.verdict} {check.message}"
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


# Joints, and the flange's position and z axis that MuJoCo 4.0.0 (mj_kinematics) gives for the model below.
MUJOCO = [
    ([0.3, -0.5, 0.2, -2.0, 0.1, 1.7, 0.5], [0.344026, 0.223983, 0.666556], [0.166431, 0.09202, -0.98175]),
    ([-1.9, 1.2, -0.7, -0.4, 2.2, 0.3, -2.5], [-0.18218, -0.627689, 0.469935], [0.771761, 0.633228, -0.058373]),
    ([2.5, -1.6, 2.8, -2.9, -2.1, 3.4, 1.0], [-0.098254, 0.096067, 0.098269], [-0.677385, 0.721111, -0.145425]),
]
# Position and quaternion of each link in its parent, as robot descriptions give them: not made from our table.
BODIES = (
    ("0 0 0.333", "1 0 0 0"),
    ("0 0 0", "1 -1 0 0"),
    ("0 -0.316 0", "1 1 0 0"),
    ("0.0825 0 0", "1 1 0 0"),
    ("-0.0825 0.384 0", "1 -1 0 0"),
    ("0 0 0", "1 1 0 0"),
    ("0.088 0 0", "1 1 0 0"),
)


def mjcf() -> str:
    """Return the arm as a MuJoCo model."""
    opening = "".join(
        f'<body pos="{position}" quat="{turn}"><joint axis="0 0 1"/><geom size="0.01" mass="1"/>'
        for position, turn in BODIES
    )
    site = '<site name="flange" pos="0 0 0.107"/>'
    return f"<mujoco><worldbody>{opening}{site}{'</body>' * len(BODIES)}</worldbody></mujoco>"


joints = st.lists(st.floats(0, 1), min_size=7, max_size=7).map(
    lambda share: np.array([JOINT_MIN + np.array(share) * (JOINT_MAX - JOINT_MIN)]).T
)


def flange_and_axis(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the flange is and the direction in which the hand points, of the product of the table; [B, 3] of both."""
    flange, tip = arm_points(q)[-2:]
    return flange.T, (tip - flange).T / FINGERTIPS


@given(joints)
def test_points_are_those_of_the_product_of_the_table(q: np.ndarray) -> None:
    points = points_on_hand(q, (FLANGE, FLANGE + FINGERTIPS))
    np.testing.assert_allclose(points.swapaxes(0, 1), arm_points(q)[-2:], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(flange_and_axis(q)[1]), 1, atol=1e-9)


@pytest.mark.parametrize(("q", "position", "axis"), MUJOCO)
def test_poses_are_those_that_mujoco_gave(q: list[float], position: list[float], axis: list[float]) -> None:
    flange, points_to = flange_and_axis(np.array([q]).T)
    np.testing.assert_allclose(flange[0], position, atol=1e-6)
    np.testing.assert_allclose(points_to[0], axis, atol=1e-6)


def test_poses_are_those_that_mujoco_gives() -> None:
    mujoco = pytest.importorskip("mujoco")
    model = mujoco.MjModel.from_xml_string(mjcf())
    data = mujoco.MjData(model)
    random = np.random.default_rng(0)
    many = random.uniform(JOINT_MIN, JOINT_MAX, size=(50, 7))
    for q, flange, axis in zip(many, *flange_and_axis(many.T), strict=True):
        data.qpos[:] = q
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(flange, data.site("flange").xpos, atol=1e-9)
        np.testing.assert_allclose(axis, data.site("flange").xmat.reshape(3, 3)[:, 2], atol=1e-9)


def test_poses_that_anybody_can_check() -> None:
    """Straight up the lengths add: 0.333 + 0.316 + 0.384 - 0.107; the hand points down, there and at home."""
    flange, axis = flange_and_axis(np.stack((np.zeros(7), HOME), axis=1))
    np.testing.assert_allclose(flange[0], [0.088, 0, 0.926], atol=1e-12)
    np.testing.assert_allclose(axis, [[0, 0, -1]] * 2, atol=1e-12)
    assert ((JOINT_MIN < HOME) & (JOINT_MAX > HOME)).all()
    assert 0.25 < flange[1, 0] < 0.35
    assert flange[1, 1] == pytest.approx(0, abs=1e-12)


@given(joints, st.floats(-1, 1))
def test_the_first_joint_turns_everything_about_the_vertical(q: np.ndarray, turn: float) -> None:
    turned = q.copy()
    turned[0] += turn
    before, after = (points_on_hand(item, (FLANGE,))[:, 0, 0] for item in (q, turned))
    cosine, sine = math.cos(turn), math.sin(turn)
    expected = [cosine * before[0] - sine * before[1], sine * before[0] + cosine * before[1], before[2]]
    np.testing.assert_allclose(after, expected, atol=1e-9)


needs_mujoco = pytest.mark.skipif(find_spec("mujoco") is None, reason="the extra `mujoco` is not installed")
needs_egl = pytest.mark.skipif(find_library("EGL") is None, reason="the system has no EGL")


def arm_scene(y: float) -> ArmScene:
    return ArmScene(HOME, np.array([0.5, y, 0.2]), time.monotonic())


def scene_camera(view: str, shown: Callable[[], ArmScene]) -> SceneCamera:
    options = CameraOptions.model_validate({"source": "scene", "view": view, "width": 64, "height": 48})
    return SceneCamera(CameraSetup("front", options, None, shown))


def greens(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the middle of the green pixels, as row and column, in shares of the picture."""
    red, green, blue = np.moveaxis(image.astype(int), -1, 0)
    rows, columns = np.nonzero((green > red + 60) & (green > blue + 60))
    return np.array([rows.mean() / image.shape[0], columns.mean() / image.shape[1]])


@needs_mujoco
@needs_egl
@pytest.mark.parametrize(("view", "leftward"), [("front", 1), ("above", -1)])
def test_point_is_where_it_is_seen_from(view: str, leftward: int) -> None:
    shown = [arm_scene(0.25)]
    eye = scene_camera(view, lambda: shown[0])
    left = eye.read(1.0)
    shown[0] = arm_scene(-0.25)
    right = eye.read(1.0)
    eye.close()
    assert left is not None
    assert right is not None
    assert left.image.shape == (48, 64, 3)
    # From the front, the arm's left is the picture's right.
    assert np.sign(greens(left.image)[1] - greens(right.image)[1]) == leftward
    assert (left.image != right.image).any()


@needs_mujoco
def test_scene_is_rendered_once() -> None:
    shown = [arm_scene(0.0)]
    eye = scene_camera("drawing", lambda: shown[0])
    first, again = eye.read(1.0), eye.read(1.0)
    assert first is not None
    assert first.image is known(again).image
    assert first.taken == shown[0].measured
    shown[0] = arm_scene(0.2)
    moved = eye.read(1.0)
    assert (known(moved).image != first.image).any()
