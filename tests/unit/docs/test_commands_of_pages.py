"""Every `rlinf` command that a page shows: the command line knows its names and options, and takes all of its words.

Most pages' commands want machines, runs or hours, so they are parsed here and not carried out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rlinf_cli.lazy import options_of
from rlinf_cli.main import app
from rlinf_cli.renamed import command_now, renewed

REPOSITORY = Path(__file__).parents[3]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Usage lines made from the code, and what benchmarks print.
MADE = {"commands.md", "faults.md", "benchmarks.md"}
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(rlinf [^`\n]+)`")
LINE = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?(rlinf [a-z].*)$")
# Placeholders in the place of more options, or of a part of a command: nothing to parse.
ELLIPSIS = re.compile(r"\.\.\.|…|\[")


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands that a page shows, from code blocks and within lines."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            result = LINE.match(line)
            if result is not None:
                yield re.split(r"\s+(?:#|\||&&|>|;)", result[1])[0].strip()
    yield from INLINE.findall(FENCE.sub("", text))


def unread(command: str) -> list[str]:
    """Return the words of a command that nothing takes, parsed as the command line does but not carried out.

    Raises:
        LookupError: there is no command of the name.
        Exception: click's own, for an option that there is not, or one without its value.
    """
    level: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    context: Any = level.context_class(level, info_name="rlinf")
    assert command_now(words) is None, "an earlier name"
    while hasattr(level, "get_command"):
        default = getattr(level, "default", None)
        if default is not None and (not words or words[0].startswith("-")):
            words = [default, *words]
        elif not words or words[0].startswith("-"):
            break
        else:
            assert renewed(words, set(options_of(level.get_command(context, words[0]))))[1] == []
        name, level, words = level.resolve_command(context, words)
        context = level.context_class(level, info_name=name, parent=context)
    # Not by `main`: callbacks of options would show help or ask for files.
    _, left, _ = level.make_parser(context).parse_args(args=list(words))
    return left


SHOWN = sorted(
    {
        (page.name, command)
        for page in PAGES
        if page.name not in MADE and page.parent.name not in ("reference", "diagnostics")
        for command in commands_of(page.read_text(encoding="utf-8"))
        if not ELLIPSIS.search(command)
    }
)


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_of_a_page_exists(page: str, command: str) -> None:
    assert unread(command) == []


def test_there_are_commands() -> None:
    assert len(SHOWN) > 100


@pytest.mark.parametrize("command", ["rlinf trian", "rlinf train --resume-from-here", "rlinf inspect memori laptop"])
def test_a_command_that_is_none_is_seen(command: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no (such )?(command|option)"):
        unread(command)


def help_of_commands(command: Any, path: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Yield each command that can be called, with the examples of its help."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    yield path, command.epilog or ""
    for name in getattr(command, "list_commands", lambda _: [])(context):
        yield from help_of_commands(command.get_command(context, name), f"{path} {name}", context)


# `rlinf inspect` and its like do nothing alone: their help lists commands.
FAMILIES = {"rlinf inspect", "rlinf runs", "rlinf robot", "rlinf tasks", "rlinf venv"}
HELP = [entry for entry in help_of_commands(typer.main.get_command(app), "rlinf") if entry[0] not in FAMILIES]


@pytest.mark.parametrize(("path", "epilog"), HELP, ids=[path for path, _ in HELP])
def test_help_shows_examples_that_parse(path: str, epilog: str) -> None:
    shown = [line.strip() for line in epilog.splitlines() if line.startswith("  ")]
    assert shown
    for example in shown:
        assert example.startswith(path)
        assert len(example) <= 76, "a terminal of 80 columns breaks the line"
        assert unread(example.partition(" > ")[0]) == []


def test_words_too_many_are_seen() -> None:
    assert unread("rlinf down cluster.yaml other.yaml") == ["other.yaml"]
