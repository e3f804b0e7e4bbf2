"""The base class of sections, its rules about keys without effect, and errors that hold several findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

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
        no_effect: when keys of this section, or of those within it, change nothing.
    """

    no_effect: ClassVar[tuple[NoEffect, ...]] = ()


# The path below the value being validated, what is wrong there, and what stands there.
Finding: TypeAlias = tuple[tuple[str | int, ...], PydanticCustomError, Any]


def several(findings: Iterable[Finding]) -> ValidationError:
    """Return one validation error that holds many findings; their paths follow that of the raising validator."""
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, error, value in findings]
    return ValidationError.from_exception_data("value", details)
