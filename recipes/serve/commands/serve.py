"""`rlinf serve`: a training service for clients of the Tinker SDK."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli import options
from rlinf_cli.command import Result, arg, command
from rlinf_cli.options import Detach, DryRun, NoWait, Share, choose_claims


@command(
    "rlinf serve serve/sums-laptop",
    "rlinf serve serve/sums-laptop server.port=8700 server.tenants=[ann,ben]",
    heading="Policies",
    excludes={"--no-wait": "--share"},
)
def app(
    arguments: Annotated[list[str], arg("FILE", options.training)],
    dry_run: DryRun = False,
    detach: Detach = False,
    no_wait: NoWait = False,
    share: Share = False,
) -> Result | int:
    """Serve training and sampling to clients of the Tinker SDK.

    FILE is a path or the name of a shipped config of `recipe: serve`, such as serve/sums-laptop; KEY=VALUE replaces a
    value of it, as in `server.port=8700`. The command prints the two environment variables that a client needs, and
    listens on loopback. Ctrl-C ends the service.
    """
    from rlinf_cli.job.job_file import load
    from rlinf_cli.run.starting import chosen, start

    choose_claims(no_wait=no_wait, share=share)
    file, overrides = chosen(arguments)
    recipe = load(file, overrides).recipe
    if recipe is not None and recipe.name != "serve":
        raise typer.BadParameter(
            f"`{file}` is a job of recipe `{recipe.name}`, which serves nothing: use `rlinf train`"
        )
    return start(file, overrides, None, dry_run=dry_run, detach=detach)
