"""`rlinf init`: write a small working project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.projects.project_files import ProjectKind, next_commands, project_files, write_project

SCHEMA = "rlinf.init/1"


def init(
    kind: Annotated[ProjectKind, typer.Argument(metavar="env|model|reward|recipe|lab", hidden=True)],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", hidden=True, show_default=False)] = Path(),
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of its Python module, of a lab its package. Default: my_env, my_model, my_reward, my_recipe, or"
            " my_lab.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a small project of your own: a module, a job file, a test, a README.

    The module is an environment, a model, a reward function or a recipe, as KIND says; a lab has all of them. FOLDER is
    the current folder by default. No file is overwritten: where one is in the way, nothing is written.
    """
    files = project_files(kind, name)
    write_project(folder, files)
    commands = next_commands(files)
    if output is Output.JSON:
        paths = [str(path) for path in files]
        console.result_json(
            {"schema": SCHEMA, "kind": kind, "folder": str(folder.absolute()), "files": paths, "next": commands}
        )
        return
    for path in files:
        console.result(str(folder / path))
    console.message("\n".join(["", f"next, in {folder.absolute()}:", *(f"  {line}" for line in commands)]))


app = command(init, examples=("rlinf init env cart", "rlinf init lab --name grasping ~/grasping"), no_args_is_help=True)
