"""`rlinf inspect config`: the resolved configuration, each value with its origin."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments.options import File, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console


def config(
    file: File,
    overrides: Overrides = None,
    output: OutputOption = Output.TEXT,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also show defaults that are null or empty.", show_default=False)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the resolved file, and each value's origin.

    The output is YAML that loads to the same values; the comment after each value is its file and line, its override,
    or `default`. Secrets are masked. KEY=VALUE replaces a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.file.job_file import load_sound
    from rlinf_cli.render.config_view import config_record, config_text
    from rlinf_core.config.composing.origins import origins, says_something
    from rlinf_core.config.secrets import mask

    job = load_sound(file, overrides)
    tree = mask(job.tree, job.secret)
    all_origins = list(origins(tree, job.model))
    if output is Output.JSON:
        console.result_json(config_record(tree, all_origins))
    else:
        console.result(config_text(origin for origin in all_origins if show_all or says_something(origin)))
