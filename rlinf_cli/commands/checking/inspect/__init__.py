"""`rlinf inspect`: views of a file and of a running job."""

from __future__ import annotations

import typer

from rlinf_cli.commands.checking.inspect import config, env, hardware, memory, placement, workers

app = typer.Typer(
    help="Inspect a file or a running job.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("placement")(placement.placement)
app.command("config")(config.config)
app.command("env")(env.env)
app.command("hardware")(hardware.hardware)
app.command("memory")(memory.memory)
app.command("workers")(workers.workers)
