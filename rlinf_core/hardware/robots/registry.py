"""Registry of robots by the name in `hardware.type`.

A package adds one with a subclass of `RobotUnit`, the decorator, and an entry point of the same name:

    [project.entry-points."rlinf.hardware"]
    Gantry = "my_lab.gantry:Gantry"

It is loaded only when a file names a type that is not registered yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import ConfigDict, create_model, model_validator

from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.process.entry_points import offered
from rlinf_core.scalars import problem
from rlinf_core.suggest import near

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


class _Described(RobotUnit):
    """A unit of which only keys of known robot types, and similar ones, are checked."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_keys_of_its_own(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        return {key: value for key, value in values.items() if near(str(key), cls.model_fields)}


def any_robot(models: Iterable[type[RobotUnit]]) -> type[RobotUnit]:
    """Return a model with the fields of all of `models`, of which only `node_rank` is required."""
    fields: dict[str, Any] = {}
    exclusive: dict[str, None] = {}
    node_ranks: dict[str, None] = {}
    variables: dict[str, None] = {}
    for model in models:
        exclusive |= dict.fromkeys(model.exclusive)
        node_ranks |= dict.fromkeys(model.node_ranks)
        variables |= dict.fromkeys(model.variables)
        for name, field in model.model_fields.items():
            if name not in RobotUnit.model_fields:
                annotation: Any = field.annotation
                if field.metadata:
                    annotation = Annotated[(annotation, *field.metadata)]
                fields.setdefault(name, (annotation | None, None))
    made = create_model("AnyRobot", __base__=_Described, **fields)
    made.exclusive, made.node_ranks, made.variables = tuple(exclusive), tuple(node_ranks), tuple(variables)
    return made
