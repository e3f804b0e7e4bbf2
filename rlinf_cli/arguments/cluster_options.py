"""Options shared by the cluster commands (`up`, `down`, `status`, `doctor`)."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments import completion

NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the cluster; by default the file's.", show_default=False),
]
RecordedName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the cluster; by default that of RLINF_CLUSTER, else the only one.",
        show_default=False,
    ),
]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", help="Nodes contacted at the same time.", min=1)]
# Typer puts brackets around an optional argument.
FileIfAny = Annotated[str | None, typer.Argument(metavar="FILE", hidden=True, autocompletion=completion.files)]
