"""Sections of which a key chooses the kind: unions of models, of which each holds its own keys and defaults.

algorithm: Annotated[Ppo | Sac, OneOf("loss_type")] = Field(default_factory=Ppo)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import tagged_union_schema

from rlinf_core.config.model import ConfigModel
from rlinf_core.suggest import near

# Begins the segment of pydantic's paths that names a member, which is none of the file's.
MEMBER: Final = "member:"
_MEMBERS: Final = "members"


class Variant(ConfigModel):
    """One of the kinds of a section.

    Attributes:
        chosen_by: the key that chooses one; its default in a member is that member's name.
        others: forms of what chooses it besides its names.
    """

    chosen_by: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the values of the key that choose this member."""
        return (str(cls.model_fields[cls.chosen_by].default),)

    @classmethod
    def takes(cls, name: str) -> bool:
        """Return whether a value of the key chooses this member: one of its names, or what else it takes."""
        return name in cls.names()


@dataclass(frozen=True, slots=True)
class OneOf:
    """Metadata of a union of variants, the default first: the key `key` of the section chooses one."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = cast("tuple[type[Variant], ...]", get_args(source))
        schemas = {MEMBER + member.__name__: handler.generate_schema(member) for member in members}

        def label(value: Any) -> str:
            if isinstance(value, BaseModel):
                return MEMBER + type(value).__name__
            written: Mapping[str, Any] = cast("Any", value) if isinstance(value, Mapping) else {}
            return MEMBER + chosen(members, written).__name__

        return tagged_union_schema(schemas, label, metadata={_MEMBERS: members})

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        members: tuple[type[Variant], ...] = cast("Any", schema)["metadata"][_MEMBERS]
        references: list[dict[str, Any]] = handler(schema)["oneOf"]
        written, *others = references
        for member, reference in zip(members[1:], others, strict=True):
            named = {"properties": {self.key: {"enum": [*member.names()]}}, "required": [self.key]}
            written = {"if": named, "then": reference, "else": written}
        # What a file extends may choose.
        return {"if": {"required": [self.key]}, "then": written, "else": {"anyOf": references}}


def chosen(members: Sequence[type[Variant]], written: Mapping[str, Any]) -> type[Variant]:
    """Return the member that a section chooses.

    Without the key, or with a value that is no text, that is the first one. Of a name that no member has, it is the one
    that was probably meant: that of a similar name, or else the one with most of the keys.
    """
    name = written.get(members[0].chosen_by)
    if not isinstance(name, str) or not name:
        return members[0]
    meant = next(iter(near(name, [known for member in members for known in member.names()])), "")
    for wanted in (name, meant):
        for member in members:
            if member.takes(wanted):
                return member
    return max(members, key=lambda member: len(written.keys() & member.model_fields.keys()))
