"""`rlinf play`: video of a trained policy."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH


def play(
    file: Annotated[str, typer.Argument(metavar="RUN|FILE", hidden=True, autocompletion=completion.files)],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="PATH", help="Of this checkpoint; by default the newest of RUN.", show_default=False
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option("--episodes", "-n", metavar="N", min=1, max=36, help="Episodes shown side by side.")
    ] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="New mp4 file; by default in `videos` of the run.", show_default=False
        ),
    ] = None,
    show: Annotated[
        bool | None,
        typer.Option(
            "--show/--no-show",
            help="Open the video in the desktop's player. Default: if there is a display.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a trained policy, and write a video of it.

    RUN is a run folder or its name. For a FILE give the weights with --checkpoint. KEY=VALUE replaces a value, as in
    env.eval.seed=7 for other start states.
    """
    from rlinf_cli.run.policy_source import checkpoint_of, used_job
    from rlinf_core.errors import RLinfError

    used = used_job(file, list(overrides or ()), log_path, "play", checkpoint)
    function = used.recipe.load(used.recipe.play)
    if function is None:
        raise RLinfError(f"recipe `{used.recipe.name}` has no video", help="use `rlinf samples` for its answers")
    weights = checkpoint_of(checkpoint, used.run)
    if weights is None:
        raise typer.BadParameter("name the weights: a checkpoint or a run", param_hint="'--checkpoint'")
    home = used.run.path / "videos" if used.run is not None else Path("videos")
    target = out or home / f"play-{weights.name}-{time.strftime('%Y%m%d-%H%M%S')}.mp4"
    result = function(used.job, weights, target, episodes=episodes, emit=console.message)
    if output is Output.JSON:
        console.result_json({"schema": "rlinf.play/1", **result})
    else:
        lines = [
            f"  {episode['env']}  {episode['outcome']}, return {episode['return']:.4g}, {episode['length']} steps"
            for episode in result["episodes"]
        ]
        console.result("\n".join([result["file"], *lines]))
    if _has_display() if show is None else show:
        typer.launch(result["file"])


def _has_display() -> bool:
    """Return whether there is a graphical display."""
    desktop = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return desktop and sys.stdout.isatty()


app = command(
    play,
    examples=(
        "rlinf play runs/embodied-20260314-101502",
        "rlinf play runs/embodied-20260314-101502 -n 9 --out grasps.mp4",
    ),
    no_args_is_help=True,
)
