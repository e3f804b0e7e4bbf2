"""The base class of sections, its rules about keys without effect, and errors that hold several findings.

A section can be a union of models, each with its own keys and defaults; a key chooses the member:

    algorithm: Annotated[Ppo | Sac, OneOf("loss_type")] = Field(default_factory=Ppo)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    LiteralString,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    create_model,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, ValidationError
from pydantic_core.core_schema import no_info_plain_validator_function, tagged_union_schema

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import NotationError, Path
from rlinf_core.scalars import StrictModel, problem
from rlinf_core.suggest import near

if TYPE_CHECKING:
    from typing_extensions import TypeAliasType

T = TypeVar("T")
WorldSizes: TypeAlias = Mapping[str, int | None]
"""Number of processes of each placed component; None if not known yet."""


@dataclass(frozen=True, slots=True)
class IgnoredKeys:
    """A condition under which keys of a section have no effect.

    Keys are relative to the section with the rule: `optim.min_lr_ratio` in a rule of `actor`. A key of a section covers
    everything in it.

    Attributes:
        keys: the keys without effect.
        when: `when(section, world_sizes)`: whether the condition holds.
        why: the reason, a clause to follow "has no effect:"; or a function of the section that returns it.
        help: the remedy.
        because: the keys that cause it. The first one that the file sets is reported with its line.
        severity: the severity, for a value that differs from the default; a written default is at most a note. An error
            is for what does not exist (`not-available`).
    """

    keys: tuple[str, ...]
    when: Callable[[Any, WorldSizes], bool]
    why: str | Callable[[Any], str]
    help: str = "remove it"
    because: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING

    def reason(self, section: Any) -> str:
        """Return why the keys have no effect in this section."""
        return self.why if isinstance(self.why, str) else self.why(section)


class ConfigModel(StrictModel):
    """A section of the file.

    Attributes:
        no_effect: rules for keys of this section, and of those within it, that have no effect.
    """

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = ()


# The path below the validated value, the error there, and the value there.
Finding: TypeAlias = tuple[Path, PydanticCustomError, Any]


def read_each(items: Iterable[tuple[Path, Any]], read: Callable[[Path, Any], T]) -> list[T]:
    """Return the results of `read` for values with their paths; raise the errors of all values together."""
    values: list[T] = []
    findings: list[Finding] = []
    for path, item in items:
        try:
            values.append(read(path, item))
        except PydanticCustomError as error:
            findings.append((path, error, item))
    if findings:
        raise several(findings)
    return values


def listed(items: Iterable[Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the items of a list with their paths."""
    return (((index,), item) for index, item in enumerate(items))


def refused(code: LiteralString, error: NotationError) -> PydanticCustomError:
    """Return the error for a value with a mistake in its notation."""
    return problem(code, error.message, help=error.help, start=error.start, end=error.end)


def several(findings: Iterable[Finding]) -> ValidationError:
    """Return one validation error with several findings; their paths are relative to the raising validator."""
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, error, value in findings]
    return ValidationError.from_exception_data("value", details)


_MEMBERS: Final = "members"


class Variant(ConfigModel):
    """One of the kinds of a section.

    Attributes:
        chosen_by: the key that chooses one; its default in a member is that member's name.
        follows: the section beside this one whose choice counts where it makes none; empty: none.
        named: the values of the key that choose this member; None: its default alone.
        form: the regular expression of further values that choose it; empty: there are none.
        others: what these are, in words of a page.
        of_kind: the keys of all kinds that say something else to each.
        lacking: why a kind lacks keys that others have, where that needs words.
    """

    chosen_by: ClassVar[str]
    follows: ClassVar[str] = ""
    named: ClassVar[tuple[str, ...] | None] = None
    form: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()
    of_kind: ClassVar[tuple[str, ...]] = ()
    lacking: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the values of the key that choose this member."""
        return (str(cls.model_fields[cls.chosen_by].default),) if cls.named is None else cls.named

    @classmethod
    def takes(cls, name: str) -> bool:
        """Return whether a value of the key chooses this member: one of its names, or a match of `form`."""
        return name in cls.names() or (bool(cls.form) and re.fullmatch(cls.form, name) is not None)

    @classmethod
    def keeps(cls, key: str, value: object, before: str, now: str) -> bool:
        """Return whether a key of `of_kind` with this value means the same in the kinds named `before` and `now`."""
        return False


V = TypeVar("V", bound=Variant)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Metadata of a union of variants, the default first: the key `key` of the section chooses one."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = cast("tuple[type[Variant], ...]", get_args(source))

        def read(value: Any) -> Variant:
            if isinstance(value, members):
                return value
            written: Mapping[str, Any] = cast("Any", value) if isinstance(value, Mapping) else {}
            return chosen(members, written).model_validate(value)

        # There are many members, and building a schema is slow: each is built when a file chooses the member.
        return no_info_plain_validator_function(read, metadata={_MEMBERS: members})

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        members: tuple[type[Variant], ...] = cast("Any", schema)["metadata"][_MEMBERS]
        union = tagged_union_schema({member.__name__: _schema_of(member) for member in members}, self.key)
        references: list[dict[str, Any]] = handler(union)["oneOf"]
        written, *others = references
        for member, reference in zip(members[1:], others, strict=True):
            values: dict[str, Any] = {"enum": [*member.names()]}
            if member.form:
                values = {"anyOf": [values, {"type": "string", "pattern": f"^({member.form})$"}]}
            named = {"properties": {self.key: values}, "required": [self.key]}
            written = {"if": named, "then": reference, "else": written}
        # The schema cannot know the choice of a base file or of a reference, and so accepts any member then.
        known = {"required": [self.key], "properties": {self.key: {"type": "string", "not": {"pattern": r"\$\{"}}}}
        return {"if": known, "then": written, "else": {"anyOf": references}}


def one_of(members: tuple[type[Variant], ...]) -> Any:
    """Return the type of a section that is one of `members`, the default first."""
    return Annotated[cast("Any", Union)[members], OneOf(members[0].chosen_by)]


def _schema_of(member: type[Variant]) -> CoreSchema:
    """Return the schema of a member by reference, so that its keys are described once."""
    member.model_rebuild()
    schema: dict[str, Any] = cast("Any", member.__pydantic_core_schema__)
    inner = schema["schema"] if schema["type"] == "definitions" else schema
    if inner["type"] != "definition-ref":
        named = {**inner, "ref": f"{member.__module__}.{member.__qualname__}:{id(member)}"}
        schema = named if inner is schema else {**schema, "schema": named}
    return cast("CoreSchema", schema)


def chosen(members: Sequence[type[V]], written: Mapping[str, Any]) -> type[V]:
    """Return the member that a section chooses.

    Without the key, that is the first. For a value that chooses no member, it is the one with the most similar name,
    or else the one with the most of the written keys; among equals, one with a `form`.
    """
    name = written.get(members[0].chosen_by)
    if name is None or name == "":
        return members[0]
    if isinstance(name, str):
        meant = next(iter(near(name, [known for member in members for known in member.names()])), "")
        for wanted in (name, meant):
            for member in members:
                if member.takes(wanted):
                    return member
    return max(members, key=lambda member: (len(written.keys() & member.model_fields.keys()), bool(member.form)))


class NoOptions(ConfigModel):
    """The options of what has none."""


def kind_of_section(
    base: type[V],
    names: tuple[str, ...],
    options: type[BaseModel] | None,
    *,
    mixins: tuple[type[ConfigModel], ...] = (),
    form: str = "",
    others: tuple[str, ...] = (),
) -> type[V]:
    """Create a kind of a section with its own `options`.

    Args:
        base: the section.
        names: the values that choose the kind; empty if only `form` does.
        options: the model of its options; None: any options.
        mixins: sections with further keys of the kind.
        form, others: see `Variant`.
    """
    fields: dict[str, Any] = {}
    if names:
        chooser = copy(base.model_fields[base.chosen_by])
        chooser.default = names[0]
        fields[base.chosen_by] = (chooser.annotation, chooser)
    if options is not None:
        is_asked = any(field.is_required() for field in options.model_fields.values())
        default: Any = Field(default_factory=dict[str, Any], validate_default=is_asked)
        fields["options"] = (Options[options], default)
    title = "".join(part.title() for part in (names[0] if names else "own").split("_"))
    created: Any = create_model(
        f"{title}{base.__name__}",
        __base__=(*mixins, base),
        __doc__=base.__doc__,
        __module__=base.__module__,
        **fields,
    )
    made = cast("type[V]", created)
    made.named, made.form, made.others = names, form, others
    setattr(sys.modules[base.__module__], made.__name__, made)  # where unpickling looks for it
    return made


Settings = TypeVar("Settings", bound=BaseModel)
if TYPE_CHECKING:
    Options = TypeAliasType("Options", dict[str, Any], type_params=(Settings,))
else:

    class Options:
        """The type of options that a model validates, `Options[Model]`: a dictionary of those that the file sets.

        The owner of the options adds the defaults.
        """

        def __class_getitem__(cls, model: type[BaseModel]) -> Any:
            return Annotated[model, AfterValidator(_as_written), PlainSerializer(_unchanged)]


def _as_written(options: BaseModel) -> dict[str, Any]:
    return _plain(options.model_dump(exclude_unset=True))


def _plain(value: Any) -> Any:
    """Return data as a file has it: lists, and names of choices; texts that say more, as names of the hub, stay."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, cast("Sequence[Any]", value))]
    return value.value if isinstance(value, Enum) else value


def _unchanged(value: Any) -> Any:
    return value
