"""What an entry says. The wrong example is also the rule's test: it must be reported between the markers."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_core.config.diagnostics import Severity

OPEN, CLOSE = "«", "»"


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration, shown by `rlinf explain` and loaded by the tests.

    In a wrong example one place, in `text`, in an override or in one of `files`, stands between `«` and `»`: what the
    caret must underline. Without markers the finding is at the start of the file.

    Attributes:
        text: the file.
        overrides: arguments of the command line.
        files: other files beside it, name and text.
        environ: the environment that `${env:...}` sees.
        assume: `--assume` arguments.
        found: how many accelerators every node turns out to have when it is asked (`--live`); None where none is.
        data: the bytes of the file where a text cannot say it; `text` then describes it.
        name: the name the file is asked for under where that is the point; nothing is written to it.
    """

    text: str
    overrides: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    assume: tuple[str, ...] = ()
    found: int | None = None
    data: bytes | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A rule.

    Attributes:
        name: kebab case, as shown in brackets.
        severity: what it is reported as.
        title: one line, no full stop.
        meaning: why it matters and what to do, a short paragraph or two.
        wrong: an example that triggers it.
        right: the same, mended.
    """

    name: str
    severity: Severity
    title: str
    meaning: str
    wrong: Example
    right: Example
