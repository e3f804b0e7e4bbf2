"""What every model of the configuration shares, and how a validator of ours reports several findings at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


class ConfigModel(BaseModel):
    """A section of the file: a value that never changes, and knows every key it may hold.

    The validator is built on first use, so that a command which only prints help does not pay for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A field that a recipe gives another default keeps the description it was declared with."""
        for base in cls.__mro__[1:]:
            if not issubclass(base, ConfigModel):
                continue
            for name, inherited in base.model_fields.items():
                field = cls.model_fields[name]
                if field.description is None:
                    field.description = inherited.description


# The path below the value being validated, what is wrong there, and what stands there.
Finding: TypeAlias = tuple[tuple[str | int, ...], PydanticCustomError, Any]


def several(findings: Iterable[Finding]) -> ValidationError:
    """Return one error that holds many.

    Raised by a validator it counts as that many errors of the whole, with the validator's own path before each.
    """
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, error, value in findings]
    return ValidationError.from_exception_data("value", details)
