"""Near names for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def near(name: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """Return the names of `known` that `name` was probably meant to be, nearest first; empty when none is close.

    A name that differs only by case, by `-` for `_`, or by a missing or extra letter is close.
    """
    # Imported here: a file without mistakes, the common case, never needs it.
    from difflib import get_close_matches

    def fold(text: str) -> str:
        return text.casefold().replace("-", "_")

    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(fold(candidate), candidate)
    matches = get_close_matches(fold(name), list(folded), n=limit, cutoff=0.6)
    return [folded[match] for match in matches]


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """`did you mean `X`?` for the nearest known name, or None."""
    found = near(name, known)
    return f"did you mean `{found[0]}`?" if found else None


def quoted(names: Iterable[str]) -> str:
    """Return `a`, `b`, `c`, each in backticks."""
    return ", ".join(f"`{name}`" for name in names)
