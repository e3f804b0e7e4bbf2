"""The options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from rlinf_cli import completion, console


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


def _be_quiet(wanted: bool) -> bool:
    console.verbosity.quiet |= wanted
    return wanted


def _be_verbose(wanted: bool) -> bool:
    console.verbosity.verbose |= wanted
    return wanted


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_be_quiet, help="Print results and errors only.", show_default=False)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", callback=_be_verbose, help="Print tracebacks and more detail.", show_default=False),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Form of the result.", metavar="text|json")]
# Arguments are told in the commands' own words: Typer's table of them would show their Python types.
File = Annotated[str, typer.Argument(metavar="FILE", hidden=True, autocompletion=completion.files)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True, autocompletion=completion.overrides)
]
Assume = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        metavar="[GROUP=]N[xMODEL]",
        help="Take each node of a group to have so many accelerators: `a800=8`, or `8` for all nodes. May be repeated.",
        autocompletion=completion.assumptions,
        show_default=False,
    ),
]


Live = Annotated[
    bool,
    typer.Option(
        "--live", help="Ask the nodes what they have, over ssh, and go by that. Starts nothing.", show_default=False
    ),
]


def is_override(argument: str) -> bool:
    """Return True for `key=value`, `~key`, `+key=value`; False for what names a file.

    A file whose name holds a `=` is named with its folder, as in `./a=b.yaml`.
    """
    if argument.startswith(("~", "+")):
        return not argument.startswith(("~/", "+/"))
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key


def assumed(assume: Iterable[str] | None) -> list[str]:
    """Return the `--assume` options as they stood on the command line."""
    return [word for each in assume or () for word in ("--assume", each)]


def split_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the files and the overrides of `FILE... [KEY=VALUE]...`, each in the order given."""
    files = [argument for argument in arguments if not is_override(argument)]
    return files, [argument for argument in arguments if is_override(argument)]
