"""The stand-in for a robot of unknown type, so that a wrong type hides no other mistakes in its units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import ConfigDict, create_model, model_validator

from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.suggest import near


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
