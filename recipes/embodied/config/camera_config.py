"""Cameras of real robots, `options.cameras` of their environments. Imports neither numpy nor a vendor package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from rlinf_core import ConfigModel
from rlinf_core.scalars import Bool, Data, Float, Int, Text, problem

_FOLDER: Final = "recipes.embodied.cameras"
_Pixels = Annotated[Int, Field(ge=8, le=4096)]
_Edge = Annotated[Int, Field(ge=0, le=8192)]
View = Literal["front", "side", "above", "wrist", "drawing"]


class CameraSource(NamedTuple):
    """A kind of camera with a built-in driver.

    Attributes:
        target: the subclass of `CameraDriver`, as `package.module:Class`.
        modules: the modules that it requires.
        install: the packages of these modules, as named by pip.
        keys: its options besides the common ones.
        attached: whether it is a device of the robot, with a number in `camera_serials`.
    """

    target: str
    modules: tuple[str, ...]
    install: str
    keys: tuple[str, ...] = ()
    attached: bool = True


# Names of makes are the values of `camera_type`.
CAMERA_SOURCES: Final[Mapping[str, CameraSource]] = {
    "realsense": CameraSource(
        f"{_FOLDER}.drivers:RealsenseCamera",
        ("pyrealsense2", "PIL"),
        "rlinf-cli[realsense]",
        ("serial", "capture"),
    ),
    "v4l2": CameraSource(
        f"{_FOLDER}.drivers:V4l2Camera", ("cv2", "PIL"), "rlinf-cli[cameras]", ("serial", "path", "capture")
    ),
    "file": CameraSource(
        f"{_FOLDER}.drivers:RecordedCamera", ("av", "PIL"), "rlinf-cli[demonstrations]", ("path",), attached=False
    ),
    "scene": CameraSource(
        "recipes.embodied.envs.franka.pictures:SceneCamera",
        ("PIL",),
        "pillow",
        ("view",),
        attached=False,
    ),
}
# The module and package that a rendered view of the scene needs.
RENDERER: Final = ("mujoco", "rlinf-cli[mujoco]")
_OWN: Final = ("serial", "path", "capture", "options")
_SPECIAL: Final = ("serial", "path", "capture", "view", "options")


class CameraOptions(ConfigModel):
    """Options of one camera."""

    source: Text | None = Field(
        default=None,
        description="The driver: `realsense`, `v4l2`, `file`, `scene`, or `package.module:Class`; null: that of the"
        " robot's `camera_type`.",
    )
    serial: Text | None = Field(
        default=None, description="Serial number of the device; null: the next one of the robot's `camera_serials`."
    )
    path: Text | None = Field(
        default=None, description="The device file of `v4l2`, or the video or folder of pictures of `file`."
    )
    width: _Pixels = Field(default=128, description="Width of the observation, in pixels.")
    height: _Pixels = Field(default=128, description="Height of the observation, in pixels.")
    crop: tuple[_Edge, _Edge, _Edge, _Edge] | None = Field(
        default=None,
        description="Left, upper, right and lower edge of the part of a captured picture that is observed, in pixels;"
        " null: the largest part around the middle that has the shape of the observation.",
    )
    capture: tuple[_Pixels, _Pixels] = Field(
        default=(640, 480), description="Width and height of the pictures that the device takes, in pixels."
    )
    fps: Annotated[Float, Field(gt=0, le=1000)] = Field(default=30.0, description="Frames per second.")
    max_age: Annotated[Float, Field(gt=0, le=60)] = Field(
        default=0.5, description="Age of the newest frame, in seconds, beyond which the robot is stopped."
    )
    view: View = Field(
        default="front",
        description="What of the scene is seen: `front`, `side`, `above`, `wrist`, or a `drawing` that needs no"
        " renderer.",
    )
    options: dict[str, Data] = Field(default_factory=dict[str, Any], description="The options of a driver of your own.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        source = CAMERA_SOURCES.get(self.source or "")
        own = ":" in (self.source or "")
        if self.source is not None and source is None and not own:
            known = ", ".join(f"`{name}`" for name in CAMERA_SOURCES)
            raise problem(
                "unknown-choice",
                f"there is no source `{self.source}`",
                help=f"known: {known}, or `package.module:Class`",
            )
        allowed = _OWN if own else ("serial", "capture") if source is None else source.keys
        strange = [name for name in _SPECIAL if name in self.model_fields_set and name not in allowed]
        if strange:
            of = f"`source: {self.source}`" if self.source else "the robot's own `camera_type`"
            raise problem("bad-value", f"`{strange[0]}` has no effect with {of}", help="remove it")
        if self.source == "file" and self.path is None:
            raise problem("bad-value", "`source: file` needs a `path`, of a video or of a folder with pictures")
        if self.crop is not None and (self.crop[0] >= self.crop[2] or self.crop[1] >= self.crop[3]):
            raise problem("bad-value", "`crop` is empty", help="write its left, upper, right and lower edge")
        return self

    def source_on(self, camera_type: str) -> str:
        """Return the driver of the camera on a robot of this `camera_type`."""
        return self.source or camera_type

    @property
    def takes_serial(self) -> bool:
        """Whether the camera is the next one of the robot's `camera_serials`."""
        if self.serial is not None or self.path is not None:
            return False
        return self.source is None or (self.source in CAMERA_SOURCES and CAMERA_SOURCES[self.source].attached)

    def modules(self, camera_type: str) -> tuple[tuple[str, str], ...]:
        """Return the modules that the camera needs, each with its package name for pip."""
        source = CAMERA_SOURCES.get(self.source_on(camera_type))
        if source is None:
            return (("PIL", "pillow"),)
        rendered = (RENDERER,) if self.source == "scene" and self.view != "drawing" else ()
        return (*((module, source.install) for module in source.modules), *rendered)


def _named(cameras: dict[str, CameraOptions]) -> dict[str, CameraOptions]:
    wrong = [name for name in cameras if not name.isidentifier() or not name.isascii()]
    if wrong:
        raise problem("bad-value", f"`{wrong[0]}` cannot name a camera", help="use letters, digits and underscores")
    return cameras


class RobotEnvOptions(ConfigModel):
    """Options of environments of real robots."""

    cameras: Annotated[dict[str, CameraOptions], AfterValidator(_named)] = Field(
        default_factory=dict[str, CameraOptions],
        description="The cameras by name, in the order of the observation's images.",
    )

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Shapes (H, W, 3) of the observations, by camera."""
        return {name: (camera.height, camera.width, 3) for name, camera in self.cameras.items()}

    def serials(self, robot_serials: tuple[str, ...]) -> dict[str, str | None]:
        """Return the serial number of each camera on a robot; None: the camera has none, or the robot lists too few."""
        left = iter(robot_serials)
        return {
            name: next(left, None) if camera.takes_serial else camera.serial for name, camera in self.cameras.items()
        }


class FrankaRobotOptions(RobotEnvOptions):
    """Options of a Franka arm."""

    point_in_states: Bool = Field(
        default=True,
        description="Whether the states contain the point to reach; without it, a policy has to see the point.",
    )
    lead_in_states: Bool = Field(
        default=False,
        description="Whether they end with how far the target of each joint is ahead of it. An arm with mass is up to"
        " half a second behind, and what follows depends on that.",
    )
