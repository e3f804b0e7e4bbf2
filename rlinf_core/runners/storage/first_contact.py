"""`first_contact.json` of a run folder: the comparisons made before the first step.

Workers compare and keep the results (`ComparingWorker`); the runner collects them and writes the file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from rlinf_core.foreign.files import read_json_object
from rlinf_core.runners.storage import durable

FILE: Final = "first_contact.json"
SCHEMA: Final = "rlinf.first_contact/1"
# `differs` stands for a difference that does not end the run; others raise an error before it begins.
Verdict: TypeAlias = Literal["agrees", "differs", "skipped"]
VERDICTS: Final[Sequence[Verdict]] = ("agrees", "skipped", "differs")
SKIPPED: Final = "left out by `runner.skip_checks`"


class Difference(NamedTuple):
    """The result of a comparison.

    Attributes:
        largest: the largest difference, in the unit of the compared values; None if the comparison has no number.
        bound: the largest difference that still agrees.
        note: further text.
        agrees: whether the two sides agree.
    """

    largest: float | None = None
    bound: float | None = None
    note: str = ""
    agrees: bool = True


@dataclass(frozen=True, slots=True)
class ContactCheck:
    """A comparison of external data or code with its description or an independent reference.

    Attributes:
        component: the component whose workers compared, for example `actor`.
        what: the compared thing, for example "observations of env.train".
        with_: its reference.
        verdict: see `Verdict`.
        largest_difference: the largest difference, in the unit of the compared values; None without a number.
        bound: the largest difference that still agrees.
        seconds: the longest time of a process; None if the comparison is a part of loading or of a step.
        note: further text.
    """

    component: str
    what: str
    with_: str
    verdict: Verdict = "agrees"
    largest_difference: float | None = None
    bound: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The component, the compared thing and its reference."""
        return self.component, self.what, self.with_


class FirstContact:
    """The comparisons of one process, until they are taken.

    Args:
        component: the component of the process.
        skips: whether to leave out costly comparisons.

    Attributes:
        skips: see above.
    """

    def __init__(self, component: str = "", *, skips: bool = False) -> None:
        self._component = component
        self.skips = skips
        self._checks: list[ContactCheck] = []

    def compare(
        self, what: str, with_: str, comparison: Callable[[], Difference | None], *, cheap: bool = False
    ) -> None:
        """Run a comparison and keep its result; its exception aborts the start of the worker.

        Args:
            what, with_: see `ContactCheck`.
            comparison: returns the result, or None if there is nothing to compare.
            cheap: whether the comparison is cheap, and so never left out.
        """
        if self.skips and not cheap:
            self._checks.append(ContactCheck(self._component, what, with_, "skipped", note=SKIPPED))
            return
        began = time.perf_counter()
        result = comparison()
        if result is not None:
            self.keep(what, with_, result, time.perf_counter() - began)

    def keep(self, what: str, with_: str, result: Difference | None = None, seconds: float | None = None) -> None:
        """Keep the result of a comparison that was made as a part of loading or of a step."""
        result = result or Difference()
        verdict: Verdict = "agrees" if result.agrees else "differs"
        if result.largest is not None and not math.isfinite(result.largest):
            # JSON has no infinity or NaN.
            result = result._replace(
                largest=None, note=f"the difference is {result.largest}; {result.note}".strip("; ")
            )
        self._checks.append(
            ContactCheck(self._component, what, with_, verdict, result.largest, result.bound, seconds, result.note)
        )

    def take(self) -> list[ContactCheck]:
        """Return the comparisons since the last call."""
        checks, self._checks = self._checks, []
        return checks


def note_comparisons(folder: Path, comparisons: Sequence[ContactCheck]) -> None:
    """Add comparisons to the file of a run folder; of equal comparisons by several processes, keep the worst result.

    A run that resumes from a checkpoint compares again, and replaces its earlier results. One process of a job writes.
    """
    new: dict[tuple[str, str, str], ContactCheck] = {}
    for comparison in comparisons:
        new[comparison.key] = _worse(new.get(comparison.key, comparison), comparison)
    if not new:
        return
    checks = ({check.key: check for check in read_comparisons(folder)} | new).values()
    rows = [{name.rstrip("_"): value for name, value in asdict(check).items()} for check in checks]
    content = {
        "schema": SCHEMA,
        "seconds": sum(check.seconds or 0.0 for check in checks),
        "skipped": sum(check.verdict == "skipped" for check in checks),
        "checks": rows,
    }
    durable.write_whole(folder / FILE, json.dumps(content, indent=1) + "\n")


def _worse(one: ContactCheck, other: ContactCheck) -> ContactCheck:
    """Return the worse result of two processes with the same comparison, with the longer time."""
    worst = max(one, other, key=lambda check: (VERDICTS.index(check.verdict), check.largest_difference or 0.0))
    return replace(
        worst, seconds=max((spent for spent in (one.seconds, other.seconds) if spent is not None), default=None)
    )


def read_comparisons(folder: Path) -> list[ContactCheck]:
    """Return the comparisons recorded in a run folder; empty if the file is missing or has another schema."""
    try:
        content = read_json_object(folder / FILE)
    except OSError:
        return []
    rows = content.get("checks") if content.get("schema") == SCHEMA else None
    checks = [_check(row) for row in cast("list[object]", rows)] if isinstance(rows, list) else []
    return [check for check in checks if check is not None]


def comparisons_text(checks: Sequence[ContactCheck]) -> str:
    """Return the results of comparisons and their time in one line, for example "8 agree, 1 skipped, 2.1 s"."""
    counts = [(sum(check.verdict == verdict for check in checks), verdict) for verdict in VERDICTS]
    words = {"agrees": "agree", "differs": "differ"}
    listed = ", ".join(f"{count} {words.get(verdict, verdict)}" for count, verdict in counts if count)
    return f"{listed}, {sum(check.seconds or 0.0 for check in checks):.1f} s"


def _check(row: object) -> ContactCheck | None:
    """Return the comparison in a row of the file; None if a value has another type than expected."""
    if not isinstance(row, dict):
        return None
    fields = cast("dict[str, Any]", row)
    texts: list[Any] = [fields.get(name) for name in ("component", "what", "with", "verdict", "note")]
    numbers: list[Any] = [fields.get(name) for name in ("largest_difference", "bound", "seconds")]
    if not all(isinstance(text, str) for text in texts) or texts[3] not in VERDICTS:
        return None
    if not all(type(number) in (int, float, type(None)) for number in numbers):
        return None
    component, what, with_, verdict, note = texts
    largest, bound, seconds = numbers
    return ContactCheck(component, what, with_, verdict, largest, bound, seconds, note)
