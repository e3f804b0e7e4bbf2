"""The answer of `rlinf eval`: the success of a policy in a table, or a video of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.run.policy_source import checkpoint_of, used_job
from rlinf_core.errors import RLinfError

_PLAYED: Final = 4
_MOST_PLAYED: Final = 36


def evaluated(
    file: str,
    overrides: list[str],
    checkpoint: str | None,
    episodes: int | None,
    out: Path | None,
    *,
    training_starts: bool,
    video: bool | None,
) -> Result:
    """Evaluate a policy, and return its success; the exit code is 1 where episodes were left out.

    Raises:
        RLinfError: the recipe cannot evaluate, or the folder of the result exists.
    """
    used = used_job(file, overrides, "eval", checkpoint)
    function = used.recipe.load(used.recipe.evaluate)
    if function is None:
        raise RLinfError(f"recipe `{used.recipe.name}` does not support `rlinf eval`")
    weights = checkpoint_of(checkpoint, used.run)
    home = used.run.path / "evaluations" if used.run is not None else Path("evaluations")
    folder = out or home / f"{'pretrained' if weights is None else weights.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise RLinfError("the result folder already exists", where=str(folder), help="name another with `-o`")
    result = function(
        used.job,
        weights,
        folder,
        episodes=episodes,
        allow_training_starts=training_starts,
        video=video,
        emit=console.message,
    )
    recordings = [
        f"{folder / recording['file']}: {len(recording['episodes'])} episodes, {recording['outcome']}"
        for recording in result.get("videos", ())
    ]
    return Result(
        partial(_shares if "sets" in result else _table, result),
        result,
        ExitCode.FAILED if result.get("left_out") else ExitCode.OK,
        (*_remarks(result), *recordings, f"{folder / 'eval.json'}"),
    )


def played(
    file: str,
    overrides: list[str],
    checkpoint: str | None,
    episodes: int | None,
    out: Path | None,
    *,
    show: bool | None,
) -> Result:
    """Write a video of a policy, and return what became of its episodes.

    Raises:
        RLinfError: the recipe has no video.
        typer.BadParameter: no weights are named, or there are too many episodes.
    """
    episodes = episodes or _PLAYED
    if episodes > _MOST_PLAYED:
        raise typer.BadParameter(f"{episodes} do not fit: at most {_MOST_PLAYED} are shown", param_hint="'--episodes'")
    used = used_job(file, overrides, "play", checkpoint)
    function = used.recipe.load(used.recipe.play)
    if function is None:
        raise RLinfError(f"recipe `{used.recipe.name}` has no video", help="use `rlinf report --samples`")
    weights = checkpoint_of(checkpoint, used.run)
    if weights is None:
        raise typer.BadParameter("name the weights: a checkpoint or a run", param_hint="'--checkpoint'")
    home = used.run.path / "videos" if used.run is not None else Path("videos")
    target = out or home / f"play-{weights.name}-{time.strftime('%Y%m%d-%H%M%S')}.mp4"
    result = function(used.job, weights, target, episodes=episodes, emit=console.message)
    lines = [
        f"  {episode['env']}  {episode['outcome']}, return {episode['return']:.4g}, {episode['length']} steps"
        for episode in result["episodes"]
    ]
    if _has_display() if show is None else show:
        typer.launch(result["file"])
    return Result("\n".join([result["file"], *lines]), {"schema": "rlinf.play/1", **result})


def _has_display() -> bool:
    """Return whether there is a graphical display."""
    desktop = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return desktop and sys.stdout.isatty()


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
