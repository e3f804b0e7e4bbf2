"""`rlinf runs`: list and prune the runs of a folder."""

from __future__ import annotations

import typer

from rlinf_cli.commands.results.runs import listing, prune

app = typer.Typer(
    help="List the runs of a folder, newest first; `prune` deletes some.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.callback()(listing.runs)
app.command("prune")(prune.prune)
