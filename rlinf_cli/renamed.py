"""Earlier names of commands and options, and what each is called now. They run for one release."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

_VALUE: Final = "VALUE"


class EarlierName(NamedTuple):
    """A command or an option that has another name now.

    Attributes:
        old: the words of the command, or the option; `VALUE` stands for its value, or for the first argument.
        new: what replaces them; empty for what has no effect any more.
        of: the command, by its name now, that an option belongs to; empty for any.
    """

    old: str
    new: str
    of: str = ""


COMMANDS: Final = (
    EarlierName("sweep", "train"),
    EarlierName("recipes", "train"),
    EarlierName("schema", "explain --schema"),
    EarlierName("inspect workers", "ps"),
    EarlierName("debug", "ps --attach"),
    EarlierName("replay", "why --replay VALUE"),
    EarlierName("samples", "report --samples"),
    EarlierName("play", "eval --play"),
    EarlierName("env", "venv"),
)
OPTIONS: Final = (
    *(EarlierName(f"{option} json", "--json") for option in ("--output", "-o")),
    *(EarlierName(f"{option} text", "") for option in ("--output", "-o")),
    *(EarlierName(f"{option} github", "--github", "validate") for option in ("--output", "-o")),
    EarlierName("--log-path VALUE", "--runs-dir VALUE"),
    EarlierName("--out VALUE", "-o VALUE"),
    EarlierName("--svg VALUE", "-o VALUE", "inspect"),
    EarlierName("--tree", "--all", "inspect"),
    EarlierName("--plot VALUE", "-o VALUE", "compare"),
    EarlierName("--html VALUE", "-o VALUE", "compare"),
    EarlierName("--save VALUE", "-o VALUE", "robot"),
    EarlierName("--live", "--watch", "report"),
    EarlierName("--port VALUE", "", "report"),
    EarlierName("--component VALUE", "VALUE", "logs"),
    EarlierName("--rank VALUE", ":VALUE", "logs"),
)


def command_now(words: Sequence[str]) -> EarlierName | None:
    """Return the row of the earlier command that a command line begins with."""
    return next((row for row in COMMANDS if list(words[: len(row.old.split())]) == row.old.split()), None)


def renewed(words: Sequence[str], known: Container[str]) -> tuple[list[str], list[str]]:
    """Return a command line with its options as they are called now, and in words what was changed.

    Args:
        words: the command, and what follows it.
        known: the options of the command: one of its own is nobody's earlier name.
    """
    renewed: list[str] = []
    changes: list[str] = []
    at = 0
    while at < len(words) and words[at] != "--":
        for row in OPTIONS:
            size, value = _matched(row.old.split(), words[at:])
            replacement = [part.replace(_VALUE, value) for part in row.new.split()]
            if size and row.of in ("", words[0]) and _is_meant(row, replacement, known):
                old, new = " ".join(words[at : at + size]), " ".join(replacement)
                changes.append(f"`{old}` is now `{new}`" if new else f"`{old}` has no effect any more")
                renewed += replacement
                at += size
                break
        else:
            renewed.append(words[at])
            at += 1
    return [*renewed, *words[at:]], changes


def with_command(row: EarlierName, rest: Sequence[str]) -> list[str]:
    """Return a command line under the name that its command has now, from what followed the earlier one."""
    name, *option = row.new.split()
    # An option that takes the first argument as its value stands before it.
    takes = option[-1:] == [_VALUE]
    flags = list(takewhile(lambda word: takes and word.startswith("-"), rest))
    return [name, *flags, *(option[:-1] if takes else option), *rest[len(flags) :]]


def _matched(pattern: Sequence[str], words: Sequence[str]) -> tuple[int, str]:
    """Return how many words an option and its value are, and the value; 0 where it is another one."""
    name, equals, value = words[0].partition("=") if words[0].startswith("--") else (words[0], "", "")
    if name != pattern[0]:
        return 0, ""
    if len(pattern) == 1:
        return (0, "") if equals else (1, "")
    size = 1 if equals else 2
    if size > len(words):
        return 0, ""
    value = value if equals else words[1]
    return (size, value) if pattern[1] in (_VALUE, value) else (0, "")


def _is_meant(row: EarlierName, replacement: Sequence[str], known: Container[str]) -> bool:
    """Return whether the command has the new name of an option, and not the earlier one.

    `-o` names a file now, and a file is hardly called `json`.
    """
    name = row.old.split()[0]
    return (name not in known or name == "-o") and (
        not replacement or not replacement[0].startswith("-") or replacement[0] in known
    )
