"""The Franka arm as a MuJoCo model (MJCF) of primitive shapes, built from the same table as our kinematics.

Lengths, joint limits and torque limits are Franka's. Masses and shapes are round estimates, not identified: capsules
around the links, and a box for the hand with its fingers, which are closed unless there is a block to grasp. Gravity is
compensated, as the real arm's controller does, and each joint follows its commanded velocity within its torque.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from recipes.embodied.robots.franka_arm import FINGERTIPS, FLANGE, JOINT_MAX, JOINT_MIN, LINKS

TIMESTEP = 0.01  # seconds of one step of physics
TORQUE_MAX = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)  # newton meters, as Franka publishes them
# Newton meter seconds per radian: the gain that holds a joint to its velocity.
VELOCITY_GAIN = (150.0, 150.0, 100.0, 100.0, 20.0, 20.0, 10.0)
PUCK_RADIUS, PUCK_HALF_HEIGHT, PUCK_MASS = 0.04, 0.02, 0.3
BLOCK_HALF, BLOCK_MASS = 0.02, 0.1
# The travel of a finger from closed to open, in meters: the Franka Hand opens twice as wide.
FINGER_TRAVEL = 0.04
# A body on the table.
Body: TypeAlias = Literal["puck", "block"]
# Contacts as bits: the arm and the body touch each other and the table; the arm never touches itself.
_TABLE = 'contype="0" conaffinity="3"'
_ARM = 'contype="1" conaffinity="0"'
_BODY = 'contype="2" conaffinity="1"'
_FREE = 'contype="0" conaffinity="0"'


class _Shape(NamedTuple):
    """The stand-in for a link: a capsule between two points of its frame, in meters, and its mass in kilograms."""

    begin: tuple[float, float, float]
    end: tuple[float, float, float]
    radius: float
    mass: float
    touches: bool


# The first two links stay near the base on the table, and collide with nothing.
_SHAPES = (
    _Shape((0, 0, -0.19), (0, 0, 0), 0.06, 3.0, False),
    _Shape((0, 0, 0), (0, -0.15, 0), 0.06, 3.0, False),
    _Shape((0, 0, -0.12), (0.06, 0, 0), 0.055, 3.0, True),
    _Shape((-0.03, 0, 0), (-0.08, 0.12, 0), 0.055, 3.0, True),
    _Shape((0, 0, -0.22), (0, 0, 0), 0.05, 3.0, True),
    _Shape((0, 0, 0), (0.06, 0, 0), 0.045, 1.5, True),
    _Shape((0, 0, 0.02), (0, 0, FLANGE - 0.03), 0.04, 0.7, True),
)
# The hand, in the frame of the last link. The fingers end at the tool center point.
_PALM_HALF, _FINGER_HALF = (0.03, 0.09, 0.03), (0.01, 0.005, 0.02)
# Contacts of fingers and block: friction that holds the block against sliding and turning, and a stiff, inelastic
# surface, so that the fingers sink less than a millimetre or two into the block.
_GRIP = 'friction="1.5 0.05 0.0001" condim="4" solref="0.02 1" solimp="0.97 0.995 0.001"'
# The servo of a finger: newtons per meter, newton seconds per meter, and newtons.
_FINGER_STIFFNESS, _FINGER_DAMPING, _FINGER_FORCE = 400.0, 60.0, 10.0


def mjcf(body: Body | None = None) -> str:
    """Return the arm on a table, with a puck to push or a block to grasp. The table's top is at height 0.

    Joints are named `joint1` to `joint7`, then, with a block, `finger1` and `finger2`; the tool center point is the
    site `tip`, the body is named after its kind. The sensors `touch1` and `touch2` of the fingers measure the force on
    their inner sides, in newtons.
    """
    grasps = body == "block"
    # An elliptic cone and a high ratio of frictional to normal impedance keep a grasped block from creeping.
    contacts = 'cone="elliptic" impratio="5"' if grasps else 'cone="pyramidal"'
    touch = '<sensor><touch site="pad1"/><touch site="pad2"/></sensor>' if grasps else ""
    things = {"puck": _puck(), "block": _block(), None: ""}[body]
    return (
        f'<mujoco model="franka"><compiler angle="radian" autolimits="true"/>'
        f'<option timestep="{TIMESTEP}" integrator="implicitfast" {contacts} iterations="20"/>'
        f'<worldbody><geom name="table" type="plane" size="2 2 0.1" friction="0.6 0.005 0.0001" {_TABLE}/>'
        f"{_arm(slides=grasps)}{things}</worldbody>"
        f"<actuator>{_motors()}{_finger_motors() if grasps else ''}</actuator>{touch}</mujoco>"
    )


def _arm(*, slides: bool) -> str:
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
    return opening + _hand(slides=slides) + "</body>" * len(LINKS)


def _hand(*, slides: bool) -> str:
    """Return the parts of the last link; as on the real arm, the hand is rotated by an eighth of a turn."""
    tip = FLANGE + FINGERTIPS
    eighth = _row(math.cos(-math.pi / 8), 0, 0, math.sin(-math.pi / 8))
    across, along, high = _FINGER_HALF
    palm = FLANGE + _PALM_HALF[2]
    fingers = (
        f'<geom name="fingers" type="box" pos="0 0 {tip - high}" quat="{eighth}" size="{_row(across, 2 * along, high)}"'
        f' mass="0.1" friction="0.4 0.005 0.0001" {_ARM}/>'
    )
    if slides:
        fingers = _finger(1, 1, eighth, tip) + _finger(2, -1, eighth, tip)
    return (
        f'<geom type="box" pos="0 0 {palm}" quat="{eighth}" size="{_row(*_PALM_HALF)}" mass="0.6" {_ARM}/>'
        f'<site name="tip" pos="0 0 {tip}"/>{fingers}'
    )


def _finger(number: int, side: int, turn: str, tip: float) -> str:
    across, along, high = _FINGER_HALF
    # Contact is sensed within 3 mm of the surface that faces the other finger.
    return (
        f'<body name="finger{number}" pos="0 0 {tip - high}" quat="{turn}" gravcomp="1">'
        f'<joint name="finger{number}" type="slide" axis="0 {side} 0" range="0 {FINGER_TRAVEL}" armature="0.5"/>'
        f'<geom name="finger{number}" type="box" pos="0 {side * along} 0" size="{_row(*_FINGER_HALF)}" mass="0.05"'
        f' {_GRIP} {_ARM}/><site name="pad{number}" type="box" size="{_row(across, 0.003, high)}"/></body>'
    )


def _puck() -> str:
    return (
        f'<body name="puck" pos="0.5 0 {PUCK_HALF_HEIGHT}"><freejoint name="puck"/>'
        f'<geom name="puck" type="cylinder" size="{PUCK_RADIUS} {PUCK_HALF_HEIGHT}" mass="{PUCK_MASS}"'
        f' friction="0.4 0.005 0.0001" {_BODY}/></body>'
    )


def _block() -> str:
    size = _row(BLOCK_HALF, BLOCK_HALF, BLOCK_HALF)
    return (
        f'<body name="block" pos="0.5 0 {BLOCK_HALF}"><freejoint name="block"/>'
        f'<geom name="block" type="box" size="{size}" mass="{BLOCK_MASS}" {_GRIP} {_BODY}/></body>'
    )


def _finger_motors() -> str:
    settings = f'kp="{_FINGER_STIFFNESS}" kv="{_FINGER_DAMPING}" forcerange="{-_FINGER_FORCE} {_FINGER_FORCE}"'
    return "".join(f'<position joint="finger{number}" {settings}/>' for number in (1, 2))


def _motors() -> str:
    return "".join(
        f'<velocity joint="joint{number}" kv="{gain}" forcerange="{_row(-torque, torque)}"/>'
        for number, (gain, torque) in enumerate(zip(VELOCITY_GAIN, TORQUE_MAX, strict=True), start=1)
    )


def _row(*numbers: float) -> str:
    return " ".join(repr(float(number)) for number in numbers)
