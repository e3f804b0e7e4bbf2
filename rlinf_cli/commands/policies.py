"""Commands that use trained policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from rlinf_cli.arguments import options
from rlinf_cli.arguments.options import Checkpoint, FileOrRun, NoWait, Overrides, Share, choose_claims
from rlinf_cli.command import Result, arg, command, opt

Format = Literal["safetensors", "torchscript", "onnx"]


@command(
    "rlinf eval runs/embodied-20260314-101502 -n 200",
    "rlinf eval embodied/pick-laptop --checkpoint runs/embodied-20260314-101502",
    "rlinf eval runs/embodied-20260314-101502 --play -n 9 -o grasps.mp4",
    name="eval",
    needs={"--play": "--show"},
    excludes={"--play": "--allow-training-starts --video", "--no-wait": "--share"},
)
def evaluate(
    file: FileOrRun,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    episodes: Annotated[
        int | None,
        opt(
            "--episodes -n N",
            "Number of episodes, or of problems of a language model; by default as in `env.eval`, or all.",
            min=1,
        ),
    ] = None,
    out: Annotated[Path | None, opt("-o FILE|FOLDER", "New folder for `eval.json`; with --play, new mp4 file.")] = None,
    allow_training_starts: Annotated[
        bool, opt("--allow-training-starts", "Evaluate from training start states.")
    ] = False,
    video: Annotated[
        bool | None, opt("--video/--no-video", "Write videos, one per outcome. Default: if there are images.")
    ] = None,
    play: Annotated[
        bool, opt("--play", "Write only a video of episodes side by side, by default 4, at most 36.")
    ] = False,
    show: Annotated[
        bool | None,
        opt("--show/--no-show", "With --play: open it in the desktop's player. Default: if there is a display."),
    ] = None,
    no_wait: NoWait = False,
    share: Share = False,
) -> Result:
    """Evaluate a policy in episodes, or a language model on problems.

    RUN is a run folder or its name. For a FILE give the weights with --checkpoint; without it those that the file names
    are evaluated. KEY=VALUE replaces a value. The result is written with its settings to `eval.json`; equal weights
    give an equal one except for `times`.
    """
    from rlinf_cli.run.policies import evaluated, played

    choose_claims(no_wait=no_wait, share=share)
    if play:
        return played(file, overrides or [], checkpoint, episodes, out, show=show)
    return evaluated(
        file, overrides or [], checkpoint, episodes, out, training_starts=allow_training_starts, video=video
    )


@command(
    "rlinf export runs/embodied-20260314-101502",
    "rlinf export runs/embodied-20260314-101502 --format onnx -o exported",
    "rlinf export runs/math-20260314-101502 --checkpoint 100",
)
def export(
    run: Annotated[str, arg("RUN", options.runs)],
    kind: Annotated[Format, opt("--format -f", "Format of the policy.", case_sensitive=False)] = "safetensors",
    checkpoint: Checkpoint = None,
    out: Annotated[Path | None, opt("-o FOLDER", "New folder; by default in `exports` of the run.")] = None,
) -> Result:
    """Export a trained policy as a self-contained folder.

    RUN is a run folder or its name. safetensors is the format of `load_policy` and `actor.model.model_path`; a language
    model becomes a folder that transformers and vLLM load. torchscript and onnx, of policies that act, are a single
    graph from observations to actions. What is written is verified against the policy.
    """
    from rlinf_cli.run.policies import exported

    return exported(run, kind, checkpoint, out)
