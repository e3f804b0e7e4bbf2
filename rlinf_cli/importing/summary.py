"""The summary of a conversion: keys carried over, renamed and omitted, as text and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlinf_cli.importing.convert import Converted
from rlinf_cli.importing.outcomes import Fate, KeyOutcome
from rlinf_core.config.diagnostics import Diagnostic
from rlinf_core.config.tree import format_path

# Keys of one reason that have a line each; `--output json` lists all.
_LISTED: Final = 4
SCHEMA: Final = "rlinf.import/1"


def verdict(converted: Converted) -> str:
    """Return the result of validating the new file, in a few words."""
    errors, lacking = len(converted.errors), len(converted.lacking)
    if errors:
        return f"{errors} error{'s' * (errors != 1)}"
    return f"valid; this machine lacks {lacking} thing{'s' * (lacking != 1)}" if lacking else "valid"


def counts(converted: Converted) -> dict[Fate, int]:
    """Count the keys by fate."""
    return {fate: sum(outcome.fate is fate for outcome in converted.outcomes) for fate in Fate}


def lines_of(converted: Converted, target: str | None) -> Iterator[str]:
    """Yield the summary for people; `target` is the file that was written."""
    number = counts(converted)
    listed = ", ".join(f"{number[fate]} {fate}" for fate in Fate)
    yield f"{target or 'nothing written'}: recipe `{converted.recipe}` ({converted.why}), from {converted.project}"
    yield f"  {len(converted.outcomes)} keys: {listed}"
    yield from _block("Renamed", _pairs(converted))
    yield from _block("Meaning changed", _notes(converted))
    for title, fate in (("Not needed", Fate.NOT_NEEDED), ("Not available", Fate.LEFT_OUT)):
        yield from _block(title, _reasons(converted, fate), number[fate])
    yield from _block("Added", [(format_path(extra.path), f"{extra.value}: {extra.why}") for extra in converted.added])
    yield from _block("Wrong", _findings(converted.errors))
    yield from _block("Missing on this machine", _findings(converted.lacking))
    yield ""
    yield f"{target or 'the result'}: {verdict(converted)}"


def _block(title: str, pairs: list[tuple[str, str]], number: int | None = None) -> Iterator[str]:
    if not pairs:
        return
    yield ""
    yield f"{title} ({len(pairs) if number is None else number})"
    width = min(max(len(name) for name, _ in pairs), 64)
    for name, words in pairs:
        yield f"  {name.ljust(width)}  {words}".rstrip()


def _pairs(converted: Converted) -> list[tuple[str, str]]:
    return [
        (outcome.source, f"-> {', '.join(outcome.targets)}")
        for outcome in converted.outcomes
        if outcome.fate is Fate.RENAMED
    ]


def _notes(converted: Converted) -> list[tuple[str, str]]:
    return [(", ".join(outcome.targets), outcome.note) for outcome in converted.outcomes if outcome.note]


def _reasons(converted: Converted, fate: Fate) -> list[tuple[str, str]]:
    """Return keys with their reason; many keys of one reason are one line."""
    keys_by_reason: dict[str, list[str]] = {}
    for outcome in converted.outcomes:
        if outcome.fate is fate:
            keys_by_reason.setdefault(outcome.reason or "", []).append(outcome.source)
    pairs: list[tuple[str, str]] = []
    for reason, keys in keys_by_reason.items():
        if len(keys) <= _LISTED:
            pairs += [(key, reason) for key in keys]
        else:
            pairs.append((f"{keys[0]} and {len(keys) - 1} more", reason))
    return pairs


def _findings(diagnostics: list[Diagnostic]) -> list[tuple[str, str]]:
    return [
        (format_path(diagnostic.path), diagnostic.message + (f": {diagnostic.help}" if diagnostic.help else ""))
        for diagnostic in diagnostics
    ]


def record(converted: Converted, source: str, target: str | None) -> dict[str, Any]:
    """Return the summary for programs."""
    from rlinf_cli.job.findings import to_json

    return {
        "file": source,
        "written": target,
        "project": str(converted.project),
        "recipe": converted.recipe,
        "counts": {fate.name.lower(): number for fate, number in counts(converted).items()},
        "keys": [_key(outcome) for outcome in converted.outcomes],
        "added": [
            {"path": format_path(extra.path), "value": extra.value, "reason": extra.why} for extra in converted.added
        ],
        "valid": not converted.errors,
        "valid_here": converted.job.ok,
        "validation": to_json([*converted.job.diagnostics]),
    }


def _key(outcome: KeyOutcome) -> dict[str, Any]:
    return {
        "key": outcome.source,
        "outcome": outcome.fate.name.lower(),
        "paths": list(outcome.targets),
        "reason": outcome.reason,
        "note": outcome.note,
        "place": outcome.place,
    }
