"""`rlinf eval`: success rate of a trained policy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping


def evaluate(
    file: Annotated[str, typer.Argument(metavar="FILE|RUN", hidden=True, autocompletion=completion.files)],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="N|PATH",
            help="Checkpoint, or its step; by default the newest of RUN.",
            show_default=False,
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            "--episodes",
            "-n",
            metavar="N",
            min=1,
            help="Number of episodes, or of problems of a language model; by default as in `env.eval`, or all.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="New folder for `eval.json`.", show_default=False),
    ] = None,
    allow_training_starts: Annotated[
        bool, typer.Option("--allow-training-starts", help="Evaluate from training start states.")
    ] = False,
    video: Annotated[
        bool | None,
        typer.Option(
            "--video/--no-video",
            help="Write videos, one per outcome. Default: if there are images.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a trained policy in complete episodes, or a language model on problems, and write the result with its
    settings to `eval.json`.

    RUN is a run folder or its name. For a FILE give the weights with --checkpoint; without it the initial weights are
    evaluated. KEY=VALUE replaces a value. Equal weights give an equal `eval.json` except for `times`.
    """
    from rlinf_cli.run.policy_source import checkpoint_of, used_job
    from rlinf_core.errors import RLinfError

    used = used_job(file, list(overrides or ()), log_path)
    function = used.recipe.load(used.recipe.evaluate)
    if function is None:
        raise RLinfError(f"recipe `{used.recipe.name}` does not support `rlinf eval`")
    weights = checkpoint_of(checkpoint, used.run)
    home = used.run.path / "evaluations" if used.run is not None else Path("evaluations")
    folder = out or home / f"{'pretrained' if weights is None else weights.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise RLinfError("the result folder already exists", where=str(folder), help="name another with `--out`")
    result = function(
        used.job,
        weights,
        folder,
        episodes=episodes,
        allow_training_starts=allow_training_starts,
        video=video,
        emit=console.message,
    )
    if output is Output.JSON:
        console.result_json(result)
        return
    console.result(_shares(result) if "sets" in result else _table(result))
    for recording in result.get("videos", ()):
        console.message(f"{folder / recording['file']}: {len(recording['episodes'])} episodes, {recording['outcome']}")
    console.message(f"{folder / 'eval.json'}")


def _table(result: Mapping[str, Any]) -> str:
    """Return a line for each task, and one for all of them."""
    rows = [("task", "episodes", "at end", "95 %", "once", "return", "length")]
    tasks: dict[str, Any] = result["tasks"]
    for name, scores in [*(tasks.items() if len(tasks) > 1 else ()), ("all", result["total"])]:
        interval = scores["success_at_end_interval"]
        rows.append(
            (
                name,
                str(scores["episodes"]),
                _share(scores["success_at_end"]),
                "" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}",
                _share(scores["success_once"]),
                f"{scores['return']:.4g}",
                f"{scores['episode_len']:.4g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _shares(result: Mapping[str, Any]) -> str:
    """Return a line for each data set of a language model's evaluation, and one for all of them."""
    sets: dict[str, dict[str, float]] = result["sets"]
    names = [name for name in sets["all"] if f"{name}_low" in sets["all"]]
    others = [name for name in ("reward", "loss", "perplexity", "length") if name in sets["all"]]
    rows = [("data set", "problems", *(word for name in names for word in (name, "95 %")), *others)]
    for name, figures in sets.items():
        shares = [
            text
            for share in names
            for text in (_share(figures[share]), f"{figures[f'{share}_low']:.3f}-{figures[f'{share}_high']:.3f}")
        ]
        rows.append((name, f"{figures['problems']:.0f}", *shares, *(f"{figures[other]:.4g}" for other in others)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


app = command(
    evaluate,
    examples=(
        "rlinf eval runs/embodied-20260314-101502 -n 200",
        "rlinf eval laptop --checkpoint runs/embodied-20260314-101502",
        "rlinf eval math_eval actor.model.model_path=model",
    ),
    no_args_is_help=True,
)
