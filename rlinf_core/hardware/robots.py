"""Robots that a node group can declare, and the registry of their types by the name in `hardware.type`.

A package adds one with a subclass of `RobotUnit`, the decorator, and an entry point of the same name:

    [project.entry-points."rlinf.hardware"]
    Gantry = "my_lab.gantry:Gantry"

It is loaded only when a file names a type that is not registered yet. Most built-in types have a validated description,
and a driver from a user's package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from rlinf_core.errors import ConfigError
from rlinf_core.process.import_path import offered
from rlinf_core.scalars import Bool, Data, Float, Int, StrictModel, Text, impossible_address, problem
from rlinf_core.suggest import did_you_mean, near, quoted, short_repr

# An address may be a variable of the node's environment, as in `$ROBOT_IP`.
FROM_NODE: Final = "or `$NAME`: the value of this variable on the node"
_VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def variable_of(text: str) -> str | None:
    """Return the variable's name if an address is a variable, else None."""
    match = _VARIABLE.fullmatch(text)
    return None if match is None else match[1]


def _ip_address(text: str) -> str:
    if variable_of(text) is not None:
        return text
    wrong = impossible_address(text)
    if wrong is not None:
        is_name = re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(\.[A-Za-z0-9-]+)*", text)
        help = f"give the address that `getent hosts {text}` shows" if is_name else "write it as in `10.10.10.1`"
        raise problem("bad-value", wrong, help=help)
    return text


def _serial(text: str) -> str:
    if not text.strip():
        raise problem("bad-value", "a serial number is missing here", help="remove the item or write the serial")
    return text


def _port(number: int) -> int:
    if not 0 < number < 65536:
        raise problem("bad-value", f"{number} is not a TCP port", help="write a number from 1 to 65535")
    return number


def _word(text: str) -> str:
    if not text or not text.isprintable() or any(map(str.isspace, text)):
        raise problem("bad-value", "must be one word without blanks", help="remove the key or write its value")
    return text


IpAddress = Annotated[Text, AfterValidator(_ip_address)]
Serial = Annotated[Text, AfterValidator(_serial)]
Serials = tuple[Serial, ...]
Port = Annotated[Int, AfterValidator(_port)]
NodeRank = Annotated[Int, Field(ge=0)]
# An address: a device file, a URL, a host.
Connection = Annotated[Text, AfterValidator(_word)]
CameraType = Literal["realsense", "zed", "v4l2"]
GripperType = Literal["franka", "robotiq"]


def _box(corners: tuple[Point, Point]) -> tuple[Point, Point]:
    low, high = corners
    if any(least >= most for least, most in zip(low, high, strict=True)):
        raise problem("bad-value", "the box between the two points is empty", help="write the lower corner first")
    return corners


Coordinate = Annotated[Float, Field(allow_inf_nan=False)]
Point = tuple[Coordinate, Coordinate, Coordinate]
Workspace = Annotated[tuple[Point, Point], AfterValidator(_box)]


class RobotUnit(StrictModel):
    """One robot: an entry of `hardware.configs`. A new robot is a subclass with additional fields.

    Attributes:
        exclusive: fields whose values must be unique, as the address of an arm.
        node_ranks: fields besides `node_rank` that hold the rank of a node.
        variables: the fields whose values may come from the node's environment: `$NAME` is its variable `NAME`.
    """

    exclusive: ClassVar[tuple[str, ...]] = ()
    node_ranks: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()

    node_rank: NodeRank = Field(description="Rank of the node that the robot is attached to.")

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Return the host and TCP port pairs at which the robot must answer before a job starts; none by default."""
        return ()

    def controller_nodes(self) -> tuple[int | None, ...]:
        """Return the rank of the node that runs the controller at each of `addresses`; None if unspecified.

        By default the values of `node_ranks`.
        """
        return tuple(getattr(self, field) for field in self.node_ranks)

    def cameras(self) -> tuple[tuple[str, str], ...]:
        """Return the cameras that must be attached before a job starts: pairs of make and serial number.

        By default those of `camera_serials` and `camera_type`, unless `disable_validate` is set.
        """
        if getattr(self, "disable_validate", False):
            return ()
        serials: tuple[str, ...] = getattr(self, "camera_serials", ())
        return tuple((str(getattr(self, "camera_type", "realsense")), serial) for serial in serials)

    def on_node(self, environ: Mapping[str, str]) -> Self:
        """Return the unit with its variables replaced by their values on the node.

        Args:
            environ: the environment of a process on the node.

        Raises:
            ConfigError: a variable is not set there, or its value is invalid.
        """
        names = {field: name for field in self.variables if (name := variable_of(str(getattr(self, field))))}
        if not names:
            return self
        for field, name in names.items():
            if not environ.get(name) or variable_of(environ[name]) is not None:
                raise self._unset(field, name, "is not set" if not environ.get(name) else "refers to another variable")
        values = {field: environ[name] for field, name in names.items()}
        try:
            return type(self).model_validate({**self.model_dump(), **values})
        except ValidationError as error:
            first = error.errors()[0]
            # A rule about several fields names none.
            field = next((field for field in names if field in first["loc"]), next(iter(names)))
            raise self._unset(field, names[field], f"is wrong: {first['msg']}") from error

    def _unset(self, field: str, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"`{field}: ${name}` of node {self.node_rank}: the variable `{name}` {what} there",
            help=f"set `{name}` in the `env_vars` of the robots' node group, or in the node's own environment before"
            " its cluster is started",
        )


ENTRY_POINT_GROUP = "rlinf.hardware"

# Stand-in for an unknown type, so that the rest of a file is checked. It ends with a character that users do not type.
UNKNOWN_TYPE: Final = "robot\N{ZERO WIDTH SPACE}"

U = TypeVar("U", bound=RobotUnit)

# Types of `franka.py`, which is imported once one of them is in use.
_FRANKA: Final = ("Franka", "DualFranka")
_BUILT_IN: Final = (*_FRANKA, "Robot", "SO-101", "DOSW1", "Turtle2", "GimArm")
_registered: dict[str, type[RobotUnit]] = {}


def register_hardware(name: str) -> Callable[[type[U]], type[U]]:
    """Make `hardware: {type: NAME}` mean the decorated model.

    Raises:
        ConfigError: another model has the name.
    """
    if callable(name):
        raise ConfigError(f"{short_repr(name)} is no hardware type", help='write `@register_hardware("NAME")`')

    def register(model: type[U]) -> type[U]:
        present = _registered.get(name)
        if present is not None and present.__qualname__ != model.__qualname__:
            raise ConfigError(
                f"hardware type `{name}` is registered twice",
                why=f"by {present.__module__}.{present.__qualname__} and {model.__module__}.{model.__qualname__}",
                help="rename one of them",
            )
        _registered[name] = model
        return model

    return register


def hardware_model(name: str) -> type[RobotUnit]:
    """Return the model of one unit of hardware type `name`.

    Raises:
        PydanticCustomError: with type `unknown-hardware-type`: it is unknown, or its package cannot be loaded.
    """
    if name == UNKNOWN_TYPE:
        return _unknown_robot()
    if name not in _registered and name in _FRANKA:
        import_module("rlinf_core.hardware.franka")
    if name not in _registered:
        _load_plugin(name)
    if name in _registered:
        return _registered[name]

    types = hardware_types()
    hint, listed = did_you_mean(name, types), f"known types: {quoted(types)}"
    raise problem(
        "unknown-hardware-type", f"unknown hardware type `{name}`", help=f"{hint} {listed}" if hint else listed
    )


def hardware_types() -> list[str]:
    """Return all names for `hardware.type`, including installed packages, in alphabetical order."""
    return sorted({*_registered, *_BUILT_IN, *offered(ENTRY_POINT_GROUP)})


def _load_plugin(name: str) -> None:
    point = offered(ENTRY_POINT_GROUP).get(name)
    if point is None:
        return
    try:
        model = point.load()
    except Exception as error:
        # A user's package may fail in any way; the finding holds the error.
        message = f"hardware type `{name}` cannot be loaded from `{point.value}`: {type(error).__name__}: {error}"
        raise problem("unknown-hardware-type", message, help="fix or remove the package that provides it") from error
    if not (isinstance(model, type) and issubclass(model, RobotUnit)):
        message = f"hardware type `{name}`: `{point.value}` is not a subclass of RobotUnit"
        raise problem("unknown-hardware-type", message, help="fix or remove the package that provides it")
    _registered.setdefault(name, model)


class _Described(RobotUnit):
    """A unit of unknown type: only its keys that equal or resemble keys of known types are checked."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_keys_of_its_own(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        return {key: value for key, value in values.items() if near(str(key), cls.model_fields)}


@cache
def _unknown_robot() -> type[RobotUnit]:
    """Return a model with the fields of all built-in models, of which only `node_rank` is required."""
    models = [hardware_model(name) for name in _BUILT_IN]
    fields: dict[str, Any] = {}
    for name, field in (item for model in models for item in model.model_fields.items()):
        if name not in RobotUnit.model_fields and name not in fields:
            annotation: Any = field.annotation
            if field.metadata:
                annotation = Annotated[(annotation, *field.metadata)]
            fields[name] = (annotation | None, None)
    made = create_model("AnyRobot", __base__=_Described, **fields)
    made.exclusive = tuple(dict.fromkeys(name for model in models for name in model.exclusive))
    made.node_ranks = tuple(dict.fromkeys(name for model in models for name in model.node_ranks))
    made.variables = tuple(dict.fromkeys(name for model in models for name in model.variables))
    return made


def _target(text: str) -> str:
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise problem("bad-value", f"`{text}` does not name a class", help="write `package.module:Class`")
    return text


def _serial_device(text: str) -> str:
    if variable_of(text) is None and not text.startswith("/dev/"):
        raise problem("bad-value", f"`{text}` is not a device", help="write its device file, as in `/dev/ttyACM0`")
    return text


DriverTarget = Annotated[Text, AfterValidator(_target)]
SerialDevice = Annotated[Connection, AfterValidator(_serial_device)]
_DRIVER = "Driver class for `env_type: robot`, `package.module:Class` (docs/robots.md)"


class PluginDrivenRobot(RobotUnit):
    """A robot with cameras and a user's driver."""

    exclusive: ClassVar[tuple[str, ...]] = ("camera_serials",)

    driver: DriverTarget | None = Field(default=None, description=f"{_DRIVER}. Default: none, for a custom `env_type`.")
    camera_serials: Serials = Field(
        default=(), description="Serial numbers of the robot's cameras, in the order of the environment's images."
    )
    camera_type: CameraType = Field(
        default="realsense", description="Vendor or interface of the cameras: `realsense`, `zed` or `v4l2`."
    )
    disable_validate: Bool = Field(
        default=False, description="Skip the check that the robot and its cameras answer before a job starts."
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Additional options of the robot's driver, by name."
    )

    @property
    def place(self) -> str:
        """The address of the robot, in words; its node if it has none."""
        return f"node {self.node_rank}"


@register_hardware("Robot")
class GenericRobot(PluginDrivenRobot):
    """Any robot: an address and a driver class."""

    exclusive: ClassVar[tuple[str, ...]] = ("address", "camera_serials")
    variables: ClassVar[tuple[str, ...]] = ("address",)

    driver: DriverTarget = Field(description=f"{_DRIVER}.")
    address: Connection = Field(
        description=f"Address of the robot for the driver: a host, `HOST:PORT`, a URL, a device file, {FROM_NODE}."
    )

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.address

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """See `RobotUnit`: only for `HOST:PORT`; other addresses are interpreted by the driver."""
        host, _, port = self.address.rpartition(":")
        named = host.removeprefix("[").removesuffix("]")
        if self.disable_validate or not named or "/" in host or not port.isascii() or not port.isdigit():
            return ()
        return ((named, int(port)),) if 0 < int(port) < 65536 else ()


@register_hardware("SO-101")
class SO101(PluginDrivenRobot):
    """An SO-101 arm on a serial port of its node."""

    exclusive: ClassVar[tuple[str, ...]] = ("device", "camera_serials")
    variables: ClassVar[tuple[str, ...]] = ("device",)

    device: SerialDevice = Field(
        description="Serial port of the arm's motor bus, preferably by id, as in"
        f" `/dev/serial/by-id/usb-1a86_USB_Single_Serial_58FD-if00`, {FROM_NODE}."
    )
    calibration: Connection | None = Field(
        default=None,
        description="File of the arm's calibration, as of `lerobot-calibrate`. Default: what its motors hold.",
    )

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.device


def _port_of(arm: str) -> str:
    return f"TCP port of the {arm}. Default: the driver's."


@register_hardware("DOSW1")
class DOSW1(PluginDrivenRobot):
    """A two-arm DOS-W1, reached over the network. Its driver comes from a user's package."""

    variables: ClassVar[tuple[str, ...]] = ("robot_url",)

    robot_url: Connection = Field(
        default="127.0.0.1",
        description=f"Host of the robot's arms, {FROM_NODE}. Default: the robot's own node.",
    )
    left_arm_port: Port | None = Field(default=None, description=_port_of("left arm"))
    right_arm_port: Port | None = Field(default=None, description=_port_of("right arm"))
    left_lead_port: Port | None = Field(default=None, description=_port_of("left lead arm, which a person moves"))
    right_lead_port: Port | None = Field(default=None, description=_port_of("right lead arm, which a person moves"))

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.robot_url


@register_hardware("Turtle2")
class Turtle2(PluginDrivenRobot):
    """A two-arm Turtle2. Its driver comes from a user's package."""


@register_hardware("GimArm")
class GimArm(PluginDrivenRobot):
    """A GimArm on its node's CAN bus. Its driver comes from a user's package."""
