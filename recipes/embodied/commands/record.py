"""`rlinf record`: demonstrations of an environment, by a scripted expert or a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Overrides, Quiet, Verbose, key_values
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

_Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="New data set folder; existing data are never overwritten."),
]
_Episodes = Annotated[int, typer.Option("--episodes", "-n", metavar="N", min=1, help="Number of episodes to keep.")]
_Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="PATH",
        help="Record the policy of this checkpoint or run instead of the scripted expert.",
        show_default=False,
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Input device for a human operator to drive, or correct the policy: keyboard, gamepad, spacemouse, leader,"
        " remote, browser; or scripted.",
        show_default=False,
    ),
]
_DeviceOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the device. May be repeated.", show_default=False),
]
_SuccessesOnly = Annotated[bool, typer.Option("--successes-only", help="Keep only episodes that end in success.")]
_Video = Annotated[bool, typer.Option("--video", help="Write images as mp4 instead of PNG in the Parquet files.")]
_Fps = Annotated[
    int | None,
    typer.Option(
        "--fps",
        metavar="N",
        min=1,
        help="Rows per second; by default the environment's control rate, if known.",
        show_default=False,
    ),
]


def record(
    file: Annotated[str, typer.Argument(metavar="FILE|RUN", hidden=True, autocompletion=completion.files)],
    overrides: Overrides = None,
    out: _Out = None,
    episodes: _Episodes = 50,
    checkpoint: _Checkpoint = None,
    device: _Device = None,
    option: _DeviceOptions = None,
    successes_only: _SuccessesOnly = False,
    video: _Video = False,
    fps: _Fps = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Record episodes of an environment as demonstrations, a LeRobotDataset folder.

    FILE is a configuration; its `env.train` selects the environment. With RUN, a run folder or its name, the policy of
    its newest checkpoint acts. KEY=VALUE replaces a value. An interrupted recording keeps complete episodes.

    With --device a human moves the arm; combined with RUN or --checkpoint, the policy acts until the human takes over.
    The device is on the node of `env`.
    """
    from rlinf_cli.run.policy_source import checkpoint_of, used_job
    from rlinf_core import RLinfError

    used = used_job(file, list(overrides or ()), log_path, "record", checkpoint)
    function = used.recipe.load(used.recipe.record)
    if function is None:
        raise RLinfError(
            f"recipe `{used.recipe.name}` does not support recording", help="`rlinf recipes` lists the others"
        )
    folder = out or Path("demonstrations") / Path(file).stem
    result = function(
        used.job,
        folder,
        episodes=episodes,
        checkpoint=checkpoint_of(checkpoint, used.run),
        device=device,
        device_options=key_values(option) if device is not None else None,
        successes_only=successes_only,
        video=video,
        fps=fps,
        emit=console.message,
    )
    if output is Output.JSON:
        console.result_json({"schema": "rlinf.record/1", **result})
        return
    solved = "" if result["successes"] is None else f", {result['successes']} solved"
    console.result(f"{result['folder']}: {result['episodes']} episodes, {result['frames']} steps{solved}")


app = command(
    record,
    examples=(
        "rlinf record laptop --out demos/pick -n 50",
        "rlinf record robot.yaml --device spacemouse --out demos/mine -n 20",
        "rlinf record runs/embodied-20260314-101502 --out learned --successes-only",
    ),
    no_args_is_help=True,
    heading="Use",
)
