"""Rules about keys that change nothing in some combination of settings, which stand beside the fields of a section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlinf_core.config.diagnostics import Severity

WorldSizes: TypeAlias = Mapping[str, int | None]
"""Number of processes of each placed component; None where it cannot be known yet."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A condition under which keys of a section change nothing.

    All keys are relative to the section that has the rule: `optim.min_lr_ratio` in a rule of `actor`. A key that holds
    a section stands for everything in it.

    Attributes:
        keys: the keys that change nothing.
        when: `when(section, world_sizes)`: whether that is so.
        why: the reason, a clause that follows "has no effect:"; or a function of the section that returns it.
        help: what to do.
        because: the keys whose values make it so. The first that the file gives is told with its line.
        severity: of a value that differs from the default; a default that is written down is a note at most. What is an
            error asks for something that is not there (`not-available`).
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
