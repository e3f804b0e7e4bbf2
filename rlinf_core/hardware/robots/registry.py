"""Registry of robots by the name in `hardware.type`.

A package adds one with a subclass of `RobotUnit`, the decorator, and an entry point of the same name:

    [project.entry-points."rlinf.hardware"]
    Gantry = "my_lab.gantry:Gantry"

It is loaded only when a file names a type that is not registered yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Final, TypeVar

from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.process.entry_points import offered
from rlinf_core.scalars import problem

ENTRY_POINT_GROUP = "rlinf.hardware"

# Stand-in for an unknown type, so that the rest of a file is checked. It ends with a character that users do not type.
UNKNOWN_TYPE: Final = "robot\N{ZERO WIDTH SPACE}"

U = TypeVar("U", bound=RobotUnit)

# Built-in types, by module, so that only those in use are imported.
_FRANKA = "rlinf_core.hardware.robots.franka"
_PLUGIN_DRIVEN = "rlinf_core.hardware.robots.plugin_driven"
_BUILT_IN = {
    "Franka": _FRANKA,
    "DualFranka": _FRANKA,
    "Robot": _PLUGIN_DRIVEN,
    "SO-101": _PLUGIN_DRIVEN,
    "DOSW1": _PLUGIN_DRIVEN,
    "Turtle2": _PLUGIN_DRIVEN,
    "GimArm": _PLUGIN_DRIVEN,
}
_registered: dict[str, type[RobotUnit]] = {}


def register_hardware(name: str) -> Callable[[type[U]], type[U]]:
    """Make `hardware: {type: NAME}` mean the decorated model.

    Raises:
        ConfigError: the name is taken by another model.
    """

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
        PydanticCustomError: `unknown-hardware-type`: it is unknown, or its package cannot be loaded.
    """
    if name == UNKNOWN_TYPE:
        return _unknown_robot()
    if name not in _registered and name in _BUILT_IN:
        import_module(_BUILT_IN[name])
    if name not in _registered:
        _load_plugin(name)
    if name in _registered:
        return _registered[name]

    from rlinf_core.suggest import did_you_mean

    types = hardware_types()
    listed = ", ".join(f"`{known_name}`" for known_name in types)
    hint = did_you_mean(name, types)
    raise problem(
        "unknown-hardware-type",
        f"unknown hardware type `{name}`",
        help=f"{hint} known types: {listed}" if hint else f"known types: {listed}",
    )


@cache
def _unknown_robot() -> type[RobotUnit]:
    from rlinf_core.hardware.robots.any_robot import any_robot

    return any_robot(map(hardware_model, _BUILT_IN))


def hardware_types() -> list[str]:
    """Return all names for `hardware.type`, including installed packages, in alphabetical order."""
    return sorted({*_registered, *_BUILT_IN, *_plugin_names()})


def _plugin_names() -> set[str]:
    return set(offered(ENTRY_POINT_GROUP))


def _load_plugin(name: str) -> None:
    point = offered(ENTRY_POINT_GROUP).get(name)
    if point is None:
        return
    try:
        model = point.load()
    except Exception as error:
        # A user's package may fail in any way; the finding holds the error.
        raise problem(
            "unknown-hardware-type",
            f"hardware type `{name}` cannot be loaded from `{point.value}`: {type(error).__name__}: {error}",
            help="fix or remove the package that provides it",
        ) from error
    if not (isinstance(model, type) and issubclass(model, RobotUnit)):
        raise problem(
            "unknown-hardware-type",
            f"hardware type `{name}`: `{point.value}` is not a subclass of RobotUnit",
            help="fix or remove the package that provides it",
        )
    _registered.setdefault(name, model)
