"""The options and arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from rlinf_cli.arguments import completion
from rlinf_cli.command import arg, opt
from rlinf_core import env_vars

File = Annotated[str, arg("FILE", completion.files)]
FileIfAny = Annotated[str | None, arg("FILE", completion.files)]
FileOrRun = Annotated[str, arg("FILE|RUN", completion.files)]
Training = Annotated[list[str] | None, arg("FILE|RECIPE", completion.training)]
Overrides = Annotated[list[str] | None, arg("KEY=VALUE", completion.overrides)]
Run = Annotated[str | None, arg("RUN", completion.runs)]
Runs = Annotated[list[str] | None, arg("RUN...", completion.runs)]
Processes = Annotated[list[str] | None, arg("RUN|COMPONENT[:RANK]", completion.runs_and_components)]
Out = Annotated[Path | None, opt("-o FILE", "Output file.")]
Assume = Annotated[
    list[str] | None,
    opt(
        "--assume [GROUP=]N[xMODEL]",
        "Assume this many accelerators on each node of a group: `a800=8`, or `8` for all nodes. May be repeated.",
        autocompletion=completion.assumptions,
    ),
]
Live = Annotated[bool, opt("--live", "Probe the nodes over ssh and use what they report. Starts nothing.")]
Checkpoint = Annotated[str | None, opt("--checkpoint N|PATH", "Checkpoint, or its step; by default the newest of RUN.")]
Recipe = Annotated[str | None, opt("--recipe NAME", "Only of this recipe.", autocompletion=completion.recipes)]
Name = Annotated[str | None, opt("--name NAME", "Name of the cluster; by default the file's, else the only one.")]
Parallel = Annotated[int, opt("--parallel N", "Nodes contacted at the same time.", min=1)]
DryRun = Annotated[bool, opt("--dry-run", "Validate, show what would run, start nothing.")]
NoWait = Annotated[
    bool, opt("--no-wait", "End with exit status 3 if another job holds an accelerator or a robot of this one.")
]
Share = Annotated[bool, opt("--share", "Use accelerators that another job holds, too, without waiting.")]
Detach = Annotated[bool, opt("--detach -d", "Run in the background and return.")]


def choose_claims(*, no_wait: bool, share: bool) -> None:
    """Choose what this process's job does where another one holds its devices; by default as the environment says."""
    if no_wait or share:
        os.environ[env_vars.CLAIMS.name] = "no-wait" if no_wait else "share"


def assumed(assume: Iterable[str] | None) -> list[str]:
    """Return the `--assume` options of the command line."""
    return [word for assumption in assume or () for word in ("--assume", assumption)]
