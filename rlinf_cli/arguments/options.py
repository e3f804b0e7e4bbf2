"""The options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.console import console


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
    typer.Option("--verbose", callback=_be_verbose, help="Print more detail, and tracebacks.", show_default=False),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the result.", metavar="text|json")]
# The docstrings describe arguments: Typer's table would show their Python types.
File = Annotated[str, typer.Argument(metavar="FILE", hidden=True, autocompletion=completion.files)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True, autocompletion=completion.overrides)
]
Assume = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        metavar="[GROUP=]N[xMODEL]",
        help="Assume this many accelerators on each node of a group: `a800=8`, or `8` for all nodes. May be repeated.",
        autocompletion=completion.assumptions,
        show_default=False,
    ),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live", help="Probe the nodes over ssh and use what they report. Starts nothing.", show_default=False
    ),
]
Run = Annotated[str | None, typer.Argument(metavar="RUN", hidden=True, autocompletion=completion.runs)]
Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN", hidden=True, autocompletion=completion.runs)]
LogPath = Annotated[
    Path,
    typer.Option(
        "--log-path",
        metavar="FOLDER",
        help="Folder of the runs: their `runner.logger.log_path`.",
        show_default=False,
    ),
]


def assumed(assume: Iterable[str] | None) -> list[str]:
    """Return the `--assume` options of the command line."""
    return [word for assumption in assume or () for word in ("--assume", assumption)]


def key_values(words: Iterable[str] | None) -> dict[str, str]:
    """Return `KEY=VALUE` options as a mapping.

    Raises:
        typer.BadParameter: a word has no `=`.
    """
    pairs: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"`{word}` is not KEY=VALUE")
        pairs[key] = value
    return pairs
