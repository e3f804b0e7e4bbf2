"""`rlinf runs`: list and prune the runs of a folder."""

from __future__ import annotations

import typer

from rlinf_cli.commands.results.runs import listing, prune
from rlinf_cli.lazy import help_examples

app = typer.Typer(
    help="List the runs of a folder, newest first; `prune` deletes some.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.callback(epilog=help_examples("rlinf runs", "rlinf runs prune --status failed --older-than 7d"))(listing.runs)
app.command("prune", epilog=help_examples("rlinf runs prune --status failed --older-than 7d"))(prune.prune)
