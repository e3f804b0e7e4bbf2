"""The base class of sections, its rules about keys without effect, and errors that hold several findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.scalars import StrictModel

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
    """Return what `read` makes of values, each with its path in the whole; raise the errors of all together."""
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


def several(findings: Iterable[Finding]) -> ValidationError:
    """Return one validation error with several findings; their paths are relative to the raising validator."""
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, error, value in findings]
    return ValidationError.from_exception_data("value", details)
