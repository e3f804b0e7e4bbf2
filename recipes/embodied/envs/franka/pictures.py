"""Images of a Franka arm in its current pose, and of the objects around it: drawn, or rendered as by a camera.

Drawings need only numpy. They have two views side by side: from the side (forward to the right, up) and from above
(forward up, left to the left). Rendered views show a simulated arm as a camera would, and a real arm as far as its
joints are known.
"""

# MuJoCo is an optional package, whose binary modules are untyped.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.drivers import ArmScene, CameraDriver, CameraError, CameraFrame, CameraSetup
from recipes.embodied.envs.franka.franka_mjcf import mjcf
from recipes.embodied.robots.franka_arm import FLANGE, arm_points
from recipes.training.arrays import Array

# The height, and the width of each of the two views, in pixels.
SIZE: Final = 128
# The square that each view shows: its left and lower edges and its size, in meters.
_SIDE_LEFT, _SIDE_LOW, _ABOVE_LEFT, _ABOVE_LOW, _LENGTH = -0.2, -0.08, -0.5, -0.15, 1.0
_PER_METRE: Final = SIZE / _LENGTH
Color: TypeAlias = tuple[int, int, int]
_COLORS: Final[dict[str, Color]] = {"red": (215, 50, 45), "green": (40, 165, 70)}
_BACKGROUND, _TABLE, _ARM, _JOINT, _HAND = (238, 238, 234), (200, 195, 185), (120, 125, 135), (70, 75, 85), (40, 40, 45)
_OPEN, _CLOSED = (150, 150, 150), (235, 150, 20)
# Radii of the arm's links, its joints, its hand and the mark of closed fingers, in meters.
_ARM_RADIUS, _JOINT_RADIUS, _HAND_RADIUS, _TIP_RADIUS = 0.028, 0.016, 0.016, 0.013
POINT_RADIUS: Final = 0.015  # meters, when drawn
_BALL_RADIUS: Final = 0.03  # meters, when rendered
# The position of a view's camera and the point that it looks at, in meters from the arm's base.
_EYES: Final[dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]]] = {
    "front": ((1.5, 0.0, 0.75), (0.35, 0.0, 0.3)),
    "side": ((0.4, -1.35, 0.6), (0.35, 0.0, 0.3)),
    "above": ((0.45, 0.0, 1.75), (0.45001, 0.0, 0.0)),
}
_RENDER_SECONDS: Final = 60.0  # after which a renderer counts as hung
_FIELD: Final = 50.0  # degrees, from the lower to the upper edge
_WRIST_FIELD: Final = 75.0
_TABLE_PAINT, _ARM_PAINT, _HAND_PAINT, _FINGERS_PAINT, _SKY = (
    (0.78, 0.76, 0.72, 1.0),
    (0.93, 0.93, 0.95, 1.0),
    (0.25, 0.26, 0.29, 1.0),
    (0.15, 0.15, 0.17, 1.0),
    (0.72, 0.80, 0.88),
)
_POINT: Final = (0.1, 0.72, 0.25, 1.0)


class Spot(NamedTuple):
    """An object that is drawn as a disc.

    Attributes:
        place: [3, n], in meters from the arm's base.
        radius: the radius in metres.
        color: the color of the disc.
    """

    place: Array
    radius: float
    color: Literal["red", "green"]


def draw_arm(joints: Array, spots: Sequence[Spot], closed: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return pictures of n arms, uint8 [n, SIZE, 2 * SIZE, 3].

    Args:
        joints: [7, n], in radians.
        spots: the objects around the arm.
        closed: bool [n], whether the fingers are closed, which is shown by an orange tip.
    """
    points = arm_points(joints)
    pictures = np.empty((joints.shape[1], SIZE, 2 * SIZE, 3), np.uint8)
    for row, is_closed in enumerate(closed.tolist()):
        arm = points[:, :, row]
        for view in (0, 1):
            canvas = _Canvas(_TABLE if view else _BACKGROUND)
            if not view:
                canvas.fill_below(-_SIDE_LOW, _TABLE)
            *links, tip = [_seen(point, view) for point in arm]
            _paint_links(canvas, links, tip)
            # A held object is drawn around the tip of the fingers.
            for spot in spots:
                place = _seen(spot.place[:, row], view)
                canvas.bar(place, place, spot.radius, _COLORS[spot.color])
            canvas.bar(tip, tip, _TIP_RADIUS, _CLOSED if is_closed else _OPEN)
            pictures[row, :, view * SIZE : (view + 1) * SIZE] = canvas.pixels.round()
    return pictures


def _seen(place: Array, view: int) -> tuple[float, float]:
    """Return the distances of a place [3] from the left and the lower edge of a view, in meters."""
    x, y, z = place.tolist()
    return (-y - _ABOVE_LEFT, x - _ABOVE_LOW) if view else (x - _SIDE_LEFT, z - _SIDE_LOW)


def _paint_links(canvas: _Canvas, points: Sequence[tuple[float, float]], tip: tuple[float, float]) -> None:
    for begin, stop in pairwise(points):
        canvas.bar(begin, stop, _ARM_RADIUS, _ARM)
    for place in points:
        canvas.bar(place, place, _JOINT_RADIUS, _JOINT)
    canvas.bar(points[-1], tip, _HAND_RADIUS, _HAND)


class _Canvas:
    """A square image with coordinates in meters.

    Attributes:
        pixels: float32 [SIZE, SIZE, 3], the upper row first.
    """

    def __init__(self, color: Color) -> None:
        self.pixels = np.full((SIZE, SIZE, 3), color, np.float32)

    def fill_below(self, height: float, color: Color) -> None:
        """Paint everything up to a height above the lower edge, in meters."""
        self.pixels[SIZE - round(height * _PER_METRE) :] = color

    def bar(self, begin: tuple[float, float], end: tuple[float, float], radius: float, color: Color) -> None:
        """Paint an antialiased line with round ends; of length 0 it is a disc."""
        (x, y), (to_x, to_y) = begin, end
        margin = radius + 1 / _PER_METRE
        left, right = _pixels(min(x, to_x) - margin, max(x, to_x) + margin)
        low, high = _pixels(min(y, to_y) - margin, max(y, to_y) + margin)
        if left >= right or low >= high:
            return
        away_x = ((np.arange(left, right) + 0.5) / _PER_METRE - x)[None, :]
        away_y = ((np.arange(high - 1, low - 1, -1) + 0.5) / _PER_METRE - y)[:, None]
        along_x, along_y = to_x - x, to_y - y
        part = np.clip((away_x * along_x + away_y * along_y) / max(along_x**2 + along_y**2, 1e-9), 0, 1)
        away = np.hypot(away_x - part * along_x, away_y - part * along_y) - radius
        cover = np.clip(0.5 - away * _PER_METRE, 0, 1)[..., None]
        within = self.pixels[SIZE - high : SIZE - low, left:right]
        within += cover * (np.array(color) - within)


def _pixels(low: float, high: float) -> tuple[int, int]:
    """Return the first pixel of an interval in meters, and the pixel after its last, within the image."""
    return max(0, int(low * _PER_METRE)), min(SIZE, int(high * _PER_METRE) + 1)


class SceneCamera(CameraDriver):
    """A view of the scene: rendered by MuJoCo, or drawn from the side and from above (`view: drawing`)."""

    on_demand: ClassVar[bool] = True

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        self._shown: ArmScene | None = None
        self._image: NDArray[np.uint8] | None = None
        options, self._renderer = setup.options, None
        # An OpenGL context belongs to one thread, but any thread may call `read`.
        self._thread = ThreadPoolExecutor(1, f"rlinf-camera-{setup.name}")
        if options.view != "drawing":
            making = self._thread.submit(_SceneRenderer, options.view, options.width, options.height)
            self._renderer = making.result(_RENDER_SECONDS)

    def read(self, seconds: float) -> CameraFrame | None:
        """See `CameraDriver`: the scene as last measured."""
        if self.setup.scene is None:
            return None
        scene = self.setup.scene()
        if self._image is None or scene is not self._shown:
            render = drawn if self._renderer is None else self._renderer.render
            self._image = self._thread.submit(render, scene).result(_RENDER_SECONDS)
            self._shown = scene
        return CameraFrame(self._image, scene.measured)

    def close(self) -> None:
        if self._renderer is not None:
            self._thread.submit(self._renderer.close).result(_RENDER_SECONDS)
            self._renderer = None
        self._thread.shutdown()


def drawn(scene: ArmScene) -> NDArray[np.uint8]:
    """Return the scene from the side and from above, uint8 [H, W, 3], without a renderer."""
    spots = [] if scene.target is None else [Spot(scene.target.reshape(3, 1), POINT_RADIUS, "green")]
    return draw_arm(scene.joints.reshape(7, 1), spots, np.zeros(1, np.bool_))[0]


class _SceneRenderer:
    """The arm on a table in MuJoCo, seen from one camera. It belongs to the thread that made it."""

    def __init__(self, view: str, width: int, height: int) -> None:
        import mujoco

        self._mujoco: Any = mujoco
        # The library chooses between these at its import, which may have been long ago.
        library = os.environ.get("MUJOCO_GL", "egl")
        try:
            self._gl: Any = import_module(f"mujoco.{library}").GLContext(width, height)
            self._gl.make_current()
            self._model = _painted(mujoco, view, width, height).compile()
            self._context: Any = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:
            raise CameraError(
                f"the view `{view}` cannot be rendered",
                why=f"{type(error).__name__}: {error}",
                help="install the system's EGL (`libegl1`), set MUJOCO_GL, or write `view: drawing`",
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._data = mujoco.MjData(self._model)
        self._seen = mujoco.MjvScene(self._model, maxgeom=200)
        self._options, self._place = mujoco.MjvOption(), mujoco.MjrRect(0, 0, width, height)
        self._eye = mujoco.MjvCamera()
        self._eye.type, self._eye.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        self._pixels = np.empty((height, width, 3), np.uint8)

    def render(self, scene: ArmScene) -> NDArray[np.uint8]:
        """Return the camera's image, uint8 [H, W, 3]."""
        mujoco, model, data = self._mujoco, self._model, self._data
        data.qpos[:7] = scene.joints
        data.mocap_pos[0] = (0, 0, -1) if scene.target is None else scene.target  # below the table, where it is hidden
        mujoco.mj_forward(model, data)
        self._gl.make_current()
        shown = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._options, None, self._eye, shown, self._seen)
        mujoco.mjr_render(self._place, self._seen, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._place, self._context)
        return self._pixels[::-1].copy()  # OpenGL begins with the lowest row

    def close(self) -> None:
        if self._gl is not None:
            self._context.free()
            self._gl.free()
            self._gl = None


def _painted(mujoco: Any, view: str, width: int, height: int) -> Any:
    """Return the model of the arm with colors, light, a camera, and a ball for the point to reach."""
    spec = mujoco.MjSpec.from_string(mjcf())
    spec.visual.quality.offsamples = 4
    spec.visual.headlight.ambient, spec.visual.headlight.diffuse = (0.35,) * 3, (0.35,) * 3
    getattr(spec.visual, "global").offwidth, getattr(spec.visual, "global").offheight = width, height
    sky = spec.add_texture(name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, width=16, height=16 * 6)
    sky.builtin, sky.rgb1, sky.rgb2 = mujoco.mjtBuiltin.mjBUILTIN_FLAT, _SKY, _SKY
    for geom in spec.geoms:
        is_box = geom.type == mujoco.mjtGeom.mjGEOM_BOX
        geom.rgba = (
            _TABLE_PAINT
            if geom.name == "table"
            else _FINGERS_PAINT
            if geom.name
            else _HAND_PAINT
            if is_box
            else _ARM_PAINT
        )
    # Shadows would take twice the time of everything else.
    spec.worldbody.add_light(
        pos=(0.8, -0.8, 2.0), dir=(-0.3, 0.4, -1.0), castshadow=False, diffuse=(0.5,) * 3, specular=(0.0,) * 3
    )
    ball = spec.worldbody.add_body(name="point", mocap=True)
    ball.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(_BALL_RADIUS, 0, 0), rgba=_POINT, contype=0, conaffinity=0)
    if view == "wrist":
        # Beside the hand, along the motion of the fingers; rotated by an eighth of a turn, as the hand is.
        eighth = math.pi / 4
        outward = np.array([math.cos(eighth), -math.sin(eighth), 0.0])
        spec.body("link7").add_camera(
            name=view, pos=0.07 * outward + (0, 0, FLANGE), fovy=_WRIST_FIELD, xyaxes=_axes(outward, (0, 0, -1), None)
        )
    else:
        eye, seen = _EYES[view]
        backward = np.subtract(eye, seen)
        spec.worldbody.add_camera(name=view, pos=eye, fovy=_FIELD, xyaxes=_axes((0, 0, 1), backward, view))
    return spec


def _axes(up: Any, backward: Any, view: str | None) -> list[float]:
    """Return the right and up directions of an image, for a camera whose back points to `backward`."""
    back = np.asarray(backward, np.float64) / np.linalg.norm(backward)
    upward = np.array((1.0, 0.0, 0.0)) if view == "above" else np.asarray(up, np.float64)
    right = np.cross(upward, back)
    right /= np.linalg.norm(right)
    return [*right.tolist(), *np.cross(back, right).tolist()]
