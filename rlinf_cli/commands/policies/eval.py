"""`rlinf eval`: success rate of a trained policy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
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

    used = used_job(file, list(overrides or ()), log_path, "eval", checkpoint)
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
    complete = not result.get("left_out")
    if output is Output.JSON:
        console.result_json(result)
        raise typer.Exit(ExitCode.OK if complete else ExitCode.FAILED)
    console.result(_shares(result) if "sets" in result else _table(result))
    for line in _remarks(result):
        console.message(line)
    for recording in result.get("videos", ()):
        console.message(f"{folder / recording['file']}: {len(recording['episodes'])} episodes, {recording['outcome']}")
    console.message(f"{folder / 'eval.json'}")
    raise typer.Exit(ExitCode.OK if complete else ExitCode.FAILED)


def _remarks(result: Mapping[str, Any]) -> list[str]:
    """Return what the figures lack, and what they say less about the policy than it seems."""
    lines: list[str] = []
    left_out, whole = result.get("left_out", 0), result.get("sets", {}).get("all", {})
    if left_out:
        kind = "answers" if whole else "episodes"
        asked = left_out + int(whole.get("answers", 0) if whole else result["total"]["episodes"])
        lines.append(
            f"incomplete: {left_out} of {asked} {kind} were left out, for no fault of the policy, and may have differed"
        )
    errors = result.get("env_errors", ())
    if errors:
        count = result["total"]["outcomes"].get("error", 0)
        lines.append(f"{count} episodes count as failed, by an error of the environment: {errors[0]}")
    if whole.get("cut_off") and "answers" in whole:
        limit = result["sampling"]["max_new_tokens"]
        cut = f"{whole['cut_off']:.0f} of {whole['answers']:.0f}"
        lines.append(f"{cut} answers cut off at max_new_tokens={limit}")
    return lines


def _table(result: Mapping[str, Any]) -> str:
    """Return a line for each task, and one for all of them."""
    rows = [("task", "episodes", "at end", "95 %", "once", "return", "length")]
    tasks: dict[str, Any] = result["tasks"]
    left_out = result["left_out"]
    for name, scores in [*(tasks.items() if len(tasks) > 1 else ()), ("all", result["total"])]:
        interval = scores["success_at_end_interval"]
        rows.append(
            (
                name,
                str(scores["episodes"]) + (f", {left_out} left out" if name == "all" and left_out else ""),
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
    counts = [
        (name, word)
        for name, word in (("left_out", "left out"), ("prompts_skipped", "too long"), ("cut_off", "cut off"))
        if sets["all"].get(name) or (name == "cut_off" and "answers" in sets["all"])
    ]
    of = "answers" if "answers" in sets["all"] else "rows"
    columns = (*(word for name in names for word in (name, "95 %")), *others, *(word for _, word in counts))
    rows = [("data set", "problems", *columns)]
    for name, figures in sets.items():
        shares = [
            text
            for share in names
            for text in (_share(figures[share]), f"{figures[f'{share}_low']:.3f}-{figures[f'{share}_high']:.3f}")
        ]
        counted = [_count(figures, count, of) for count, _ in counts]
        values = (f"{figures[other]:.4g}" for other in others)
        rows.append((name, f"{figures['problems']:.0f}", *shares, *values, *counted))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _count(figures: Mapping[str, float], name: str, of: str) -> str:
    """Return `3 of 160`: answers that are not among those that count are told alone."""
    count = f"{figures.get(name, 0):.0f}"
    return f"{count} of {figures[of]:.0f}" if name == "cut_off" else count


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
