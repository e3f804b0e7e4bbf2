"""Words of messages: suggestions for misspelt names, lists of names, quoted pieces, and escapes of untrusted text.

A worker's output, an error, a field of a run's file or a file name can hold sequences that set a terminal's title, fill
the clipboard, erase earlier lines, or reverse the direction of text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Final

# C0 but tab and newline, DEL, C1, the separators of lines and paragraphs, and controls of text direction.
_ACTED_ON: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return a text with control characters, except tab and newline, as escapes such as `\\x1b`; CRLF becomes LF."""
    text = text.replace("\r\n", "\n")
    return _ACTED_ON.sub(lambda match: escape_of(match[0]), text)


def replaced(text: str) -> str:
    """Return a text of the same length with control characters, except tab and newline, replaced by U+FFFD."""
    return _ACTED_ON.sub("\ufffd", text)


def encodable(text: str) -> str:
    """Return a text with halves of characters, as in file names that are not UTF-8, as escapes such as `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_of(character: str) -> str:
    """Return the escape of a character as Python and YAML write it, such as `\\x1b`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_CLOSE = 0.6


def near(name: str, known: Iterable[str], least: float = _CLOSE) -> list[str]:
    """Return the name in `known` most similar to `name`, as a list; empty if none is similar.

    `least` is the smallest similarity, from 0 to 1. Names that differ by case, by `-` for `_`, or by a letter are
    similar. Common suffixes do not count: `action_dim` is not similar to `hidden_dim`.
    """
    # Imported here: a file without mistakes, the common case, never needs it.
    from difflib import get_close_matches

    def fold(text: str) -> str:
        return str(text).casefold().replace("-", "_")  # a program may ask for any object

    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(fold(candidate), candidate)
    matches = get_close_matches(fold(name), list(folded), n=1, cutoff=least)
    return [folded[match] for match in matches if _heads_are_close(fold(name), match)]


def _heads_are_close(one: str, other: str) -> bool:
    """Return whether two names are similar without their common suffix."""
    from difflib import SequenceMatcher

    heads, others = one.split("_"), other.split("_")
    while heads and others and heads[-1] == others[-1]:
        heads.pop()
        others.pop()
    return not heads or not others or SequenceMatcher(None, "_".join(heads), "_".join(others)).ratio() >= _CLOSE


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return `did you mean `X`?` for the nearest known name, or None."""
    candidates = near(name, known)
    return f"did you mean `{candidates[0]}`?" if candidates else None


def quoted(names: Iterable[str]) -> str:
    """Return the names in backticks, joined by commas."""
    return ", ".join(f"`{name}`" for name in names)


def excerpt(text: str, limit: int = 60) -> str:
    """Return a text as quoted in messages: on one line, and truncated."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


# Most characters of a message's line, and of a message, so that it stays readable whatever it quotes.
LONGEST_LINE = 1_000
_LONGEST_MESSAGE = 50_000


def clipped(text: str) -> str:
    """Return a message without its middle if a quoted file, node or variable makes it enormous.

    The omitted part begins and ends at a blank if one is near: masking would not recognize half of a secret.
    """
    if len(text) <= LONGEST_LINE:
        return text
    text = _shortened(text, _LONGEST_MESSAGE)
    return "\n".join(_shortened(line, LONGEST_LINE) for line in text.split("\n"))


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[-limit // 4 :]
    before, after = head[:-100] + head[-100:].rpartition(" ")[0], tail[:100].partition(" ")[2] + tail[100:]
    return f"{before} ... ({len(text) - len(before) - len(after)} characters) ... {after}"


# Conversion of arguments from untyped callers.


def as_index(value: object) -> int | None:
    """Return a Python or NumPy integer as an int; None for all else, such as 1.0 and True."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        return None


def short_repr(value: object) -> str:
    """Return a short one-line representation of a value."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - Python does not format numbers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
