"""The Franka arm as a MuJoCo model (MJCF) of primitive shapes, built from the same table as our kinematics.

Lengths, joint limits and torque limits are Franka's. Masses and shapes are round numbers of the right size, not
identified ones: capsules around the links, the hand as a box with its fingers closed. Gravity is compensated, as the
real arm's controller does, and each joint follows the velocity that it is told within its torque.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from recipes.embodied.robots.franka_kinematics import FINGERTIPS, FLANGE, JOINT_MAX, JOINT_MIN, LINKS

TIMESTEP = 0.01  # seconds of one step of physics
TORQUE_MAX = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)  # newton metres, as Franka publishes them
# Newton metre seconds per radian: how hard a joint is held to its velocity.
VELOCITY_GAIN = (150.0, 150.0, 100.0, 100.0, 20.0, 20.0, 10.0)
PUCK_RADIUS, PUCK_HALF_HEIGHT, PUCK_MASS = 0.04, 0.02, 0.3
# Who touches whom, as bits: the arm and the puck touch each other and the table; the arm never touches itself.
_TABLE = 'contype="0" conaffinity="3"'
_ARM = 'contype="1" conaffinity="0"'
_PUCK = 'contype="2" conaffinity="1"'
_FREE = 'contype="0" conaffinity="0"'


class _Shape(NamedTuple):
    """The stand-in for a link: a capsule between two points of its frame, in metres, and its mass in kilograms."""

    begin: tuple[float, float, float]
    end: tuple[float, float, float]
    radius: float
    mass: float
    touches: bool


# The first two links stay near the base, which stands on the table: they touch nothing.
_SHAPES = (
    _Shape((0, 0, -0.19), (0, 0, 0), 0.06, 3.0, False),
    _Shape((0, 0, 0), (0, -0.15, 0), 0.06, 3.0, False),
    _Shape((0, 0, -0.12), (0.06, 0, 0), 0.055, 3.0, True),
    _Shape((-0.03, 0, 0), (-0.08, 0.12, 0), 0.055, 3.0, True),
    _Shape((0, 0, -0.22), (0, 0, 0), 0.05, 3.0, True),
    _Shape((0, 0, 0), (0.06, 0, 0), 0.045, 1.5, True),
    _Shape((0, 0, 0.02), (0, 0, FLANGE - 0.03), 0.04, 0.7, True),
)
# The hand, in the frame of the last link. Its fingers are closed and end at the tool centre point.
_PALM_HALF, _FINGER_HALF = (0.03, 0.09, 0.03), (0.01, 0.01, 0.02)


def mjcf(*, puck: bool) -> str:
    """Return the arm on a table, with a puck to push where `puck` is true. The table's top is the height 0.

    Joints are named `joint1` to `joint7`, the tool centre point is the site `tip`, the puck's body is `puck`.
    """
    return (
        f'<mujoco model="franka"><compiler angle="radian" autolimits="true"/>'
        f'<option timestep="{TIMESTEP}" integrator="implicitfast" cone="pyramidal" iterations="20"/>'
        f'<worldbody><geom name="table" type="plane" size="2 2 0.1" friction="0.6 0.005 0.0001" {_TABLE}/>'
        f"{_arm()}{_puck() if puck else ''}</worldbody><actuator>{_motors()}</actuator></mujoco>"
    )


def _arm() -> str:
    opening = ""
    for number, (link, shape) in enumerate(zip(LINKS, _SHAPES, strict=True), start=1):
        angle = link.alpha * math.pi / 2
        position = (link.a, -math.sin(angle) * link.d, math.cos(angle) * link.d)
        turn = (math.cos(angle / 2), math.sin(angle / 2), 0, 0)
        limits = _row(JOINT_MIN[number - 1], JOINT_MAX[number - 1])
        opening += (
            f'<body name="link{number}" pos="{_row(*position)}" quat="{_row(*turn)}" gravcomp="1">'
            f'<joint name="joint{number}" axis="0 0 1" range="{limits}" armature="0.1"/>'
            f'<geom type="capsule" fromto="{_row(*shape.begin, *shape.end)}" size="{shape.radius}"'
            f' mass="{shape.mass}" {_ARM if shape.touches else _FREE}/>'
        )
    return opening + _hand() + "</body>" * len(LINKS)


def _hand() -> str:
    """Shapes of the last link: the hand of the real arm is mounted an eighth of a turn about its axis."""
    tip = FLANGE + FINGERTIPS
    eighth = _row(math.cos(-math.pi / 8), 0, 0, math.sin(-math.pi / 8))
    palm, finger = FLANGE + _PALM_HALF[2], tip - _FINGER_HALF[2]
    return (
        f'<geom type="box" pos="0 0 {palm}" quat="{eighth}" size="{_row(*_PALM_HALF)}" mass="0.6" {_ARM}/>'
        f'<geom name="fingers" type="box" pos="0 0 {finger}" quat="{eighth}" size="{_row(*_FINGER_HALF)}" mass="0.1"'
        f' friction="0.4 0.005 0.0001" {_ARM}/><site name="tip" pos="0 0 {tip}"/>'
    )


def _puck() -> str:
    return (
        f'<body name="puck" pos="0.5 0 {PUCK_HALF_HEIGHT}"><freejoint name="puck"/>'
        f'<geom name="puck" type="cylinder" size="{PUCK_RADIUS} {PUCK_HALF_HEIGHT}" mass="{PUCK_MASS}"'
        f' friction="0.4 0.005 0.0001" {_PUCK}/></body>'
    )


def _motors() -> str:
    return "".join(
        f'<velocity joint="joint{number}" kv="{gain}" forcerange="{_row(-torque, torque)}"/>'
        for number, (gain, torque) in enumerate(zip(VELOCITY_GAIN, TORQUE_MAX, strict=True), start=1)
    )


def _row(*numbers: float) -> str:
    return " ".join(repr(float(number)) for number in numbers)
