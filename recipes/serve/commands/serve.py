"""`rlinf serve`: a training service for clients of the Tinker SDK."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.lazy import command


def serve(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE", hidden=True, autocompletion=completion.training),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Validate, show placement and resolved config, start nothing.", show_default=False
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background and return.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve training and sampling to clients of the Tinker SDK, on loopback.

    FILE is a path or the name of a shipped config of `recipe: serve`, such as serve_laptop; KEY=VALUE replaces a value
    of it, as in `server.port=8700`. The command prints the two environment variables that a client needs. Ctrl-C ends
    the service.
    """
    from rlinf_cli.commands.training.train import train
    from rlinf_cli.file.job_file import load, split_files

    files, overrides = split_files(arguments)
    if len(files) == 1:
        job = load(files[0], overrides)
        if job.recipe is not None and job.recipe.name != "serve":
            message = f"`{files[0]}` is a job of recipe `{job.recipe.name}`, which serves nothing: use `rlinf train`"
            raise typer.BadParameter(message)
    train(arguments, dry_run=dry_run, detach=detach, output=output, quiet=quiet, verbose=verbose)


app = command(
    serve,
    examples=("rlinf serve serve_laptop", "rlinf serve serve_laptop server.port=8700 server.tenants=[ann,ben]"),
    heading="Use",
    no_args_is_help=True,
)
