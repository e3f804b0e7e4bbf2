"""The base class of sections, its rules about keys without effect, and errors that hold several findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, ValidationError

from rlinf_core.config.diagnostics import Severity
from rlinf_core.scalars import StrictModel

WorldSizes: TypeAlias = Mapping[str, int | None]
"""Number of processes of each placed component; None where it cannot be known yet."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A condition under which keys of a section change nothing.

    Keys are relative to the section that has the rule: `optim.min_lr_ratio` in a rule of `actor`. A key that holds a
    section stands for everything in it.

    Attributes:
        keys: the keys that change nothing.
        when: `when(section, world_sizes)`: whether that is so.
        why: the reason, a clause that follows "has no effect:"; or a function of the section that returns it.
        help: what to do.
        because: the keys whose values make it so. The first that the file gives is told with its line.
        severity: of a value that differs from the default; a default that is written down is a note at most. An error
            asks for something that is not there (`not-available`).
    """

    keys: tuple[str, ...]
    when: Callable[[Any, WorldSizes], bool]
    why: str | Callable[[Any], str]
    help: str = "remove it"
    because: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING

    def reason(self, section: Any) -> str:
        """Return why the keys change nothing in this section."""
        return self.why if isinstance(self.why, str) else self.why(section)


class ConfigModel(StrictModel):
    """A section of the file.

    Attributes:
        other_names: further names of fields, those of related projects, each with the field it means.
        moved: keys of related projects that stand in another section here, each with its path. Findings name ours, and
            `rlinf import` moves them.
        not_available: keys of related projects that have no counterpart here, each with what to do instead.
        no_effect: when keys of this section, or of those within it, change nothing.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    moved: ClassVar[Mapping[str, str]] = {}
    not_available: ClassVar[Mapping[str, str]] = {}
    no_effect: ClassVar[tuple[NoEffect, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties: dict[str, Any] = handler.resolve_ref_schema(schema).get("properties", {})
        for other, name in cls.other_names.items():
            if name not in properties:
                continue
            properties[other] = {**properties[name], "description": f"Another name of `{name}`."}
        return schema


# The path below the value being validated, what is wrong there, and what stands there.
Finding: TypeAlias = tuple[tuple[str | int, ...], PydanticCustomError, Any]


def several(findings: Iterable[Finding]) -> ValidationError:
    """Return one validation error that holds many findings; their paths follow that of the raising validator."""
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, error, value in findings]
    return ValidationError.from_exception_data("value", details)
