"""`rlinf record`: demonstrations of an environment, by a scripted expert or a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rlinf_cli import console
from rlinf_cli.command import Result, command, key_values, opt
from rlinf_cli.options import Checkpoint, FileOrRun, NoWait, Overrides, Share, choose_claims


@command(
    "rlinf record embodied/pick-laptop -o demos/pick -n 50",
    "rlinf record robot.yaml --device spacemouse -o demos/mine -n 20",
    "rlinf record runs/embodied-20260314-101502 -o learned --successes-only",
    heading="Robots",
    excludes={"--no-wait": "--share"},
)
def app(
    file: FileOrRun,
    overrides: Overrides = None,
    out: Annotated[Path | None, opt("-o FOLDER", "New data set folder; existing data are never overwritten.")] = None,
    episodes: Annotated[int, opt("--episodes -n N", "Number of episodes to keep.", min=1)] = 50,
    checkpoint: Checkpoint = None,
    device: Annotated[
        str | None,
        opt(
            "--device NAME",
            "Input device for a human operator to drive, or correct the policy: keyboard, gamepad, spacemouse, leader,"
            " browser; or scripted.",
        ),
    ] = None,
    option: Annotated[list[str] | None, opt("--option KEY=VALUE", "Option of the device. May be repeated.")] = None,
    successes_only: Annotated[bool, opt("--successes-only", "Keep only episodes that end in success.")] = False,
    video: Annotated[bool, opt("--video", "Write images as mp4 instead of PNG in the Parquet files.")] = False,
    fps: Annotated[
        int | None, opt("--fps N", "Rows per second; by default the environment's control rate, if known.", min=1)
    ] = None,
    no_wait: NoWait = False,
    share: Share = False,
) -> Result:
    """Record episodes of an environment as demonstrations.

    They become a LeRobotDataset folder. FILE is a configuration; its `env.train` selects the environment. With RUN, a
    run folder or its name, the policy of its newest checkpoint acts. KEY=VALUE replaces a value. An interrupted
    recording keeps complete episodes.

    With --device a human moves the arm; combined with RUN or --checkpoint, the policy acts until the human takes over.
    The device is on the node of `env`.
    """
    from rlinf_cli.run.policies import checkpoint_of, used_job
    from rlinf_core import RLinfError

    choose_claims(no_wait=no_wait, share=share)
    used = used_job(file, overrides or [], "record", checkpoint)
    function = used.recipe.load(used.recipe.record)
    if function is None:
        raise RLinfError(
            f"recipe `{used.recipe.name}` does not support recording", help="`rlinf train` lists the others"
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
    solved = "" if result["successes"] is None else f", {result['successes']} solved"
    return Result(
        f"{result['folder']}: {result['episodes']} episodes, {result['frames']} steps{solved}",
        {"schema": "rlinf.record/1", **result},
    )
