"""`rlinf inspect`: views of a file and of a running job."""

from __future__ import annotations

import typer

from rlinf_cli.commands.checking.inspect import config, env, hardware, memory, placement, workers
from rlinf_cli.lazy import help_examples

app = typer.Typer(
    help="Inspect a file or a running job.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command(
    "placement",
    epilog=help_examples(
        "rlinf inspect placement hetero18 --tree", "rlinf inspect placement job.yaml --assume a800=8 --svg job.svg"
    ),
)(placement.placement)
app.command(
    "config", epilog=help_examples("rlinf inspect config laptop", "rlinf inspect config job.yaml runner.max_steps=50")
)(config.config)
app.command("env", epilog=help_examples("rlinf inspect env hetero18 --component actor --rank 3"))(env.env)
app.command("hardware", epilog=help_examples("rlinf inspect hardware cluster.yaml"))(hardware.hardware)
app.command(
    "memory",
    epilog=help_examples(
        "rlinf inspect memory laptop actor.model.hidden_dim=4096", "rlinf inspect memory runs/embodied-20260314-101502"
    ),
)(memory.memory)
app.command("workers", epilog=help_examples("rlinf inspect workers"))(workers.workers)
