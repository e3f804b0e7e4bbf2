"""Commands on a job and its checkpoint: `rlinf eval`, `rlinf export`, and `rlinf why --replay`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.runs.run_lookup import find_run, find_run_folder
from rlinf_core.config.diagnostics import Severity
from rlinf_core.errors import ConfigError, RLinfError, RunError
from rlinf_core.job.load import Job, load_job
from rlinf_core.job.recipe import Recipe
from rlinf_core.runners.opened_run import note_step
from rlinf_core.runners.storage.checkpoint import load_manifest, sound_checkpoint
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.run_events import read_quarantine
from rlinf_core.runners.storage.run_folder import RunFolder, unused_path
from rlinf_core.runners.storage.run_state import STATE
from rlinf_core.suggest import did_you_mean, quoted


class UsedJob(NamedTuple):
    """A validated job that a command uses.

    Attributes:
        job: the job of the file, or of the run's `config.yaml`.
        recipe: the recipe of the job.
        run: the run folder; None if a file was named.
    """

    job: Job
    recipe: Recipe
    run: RunFolder | None


def used_job(name: str, overrides: list[str], command: str, checkpoint: str | None) -> UsedJob:
    """Return the validated job of a file or a run, and choose its cluster.

    Args:
        name: a file, a shipped configuration, a run folder, or the name of a run.
        overrides: `key=value` and `~key` arguments.
        command: the command that uses the job.
        checkpoint: the checkpoint given on the command line.

    Raises:
        typer.Exit: the configuration has errors, which were printed.
        ConfigError: the configuration selects no recipe, or the command ignores one of `overrides`.
        RLinfError: the job's machines do not include this machine.
    """
    from rlinf_cli.job.job_file import load, show_findings, sound, without_start, without_training_data
    from rlinf_cli.run.driver import choose_cluster, cluster_elsewhere
    from rlinf_cli.run.starting import check_installed, refuse_unused, with_hub_pins

    run = find_run_folder(name)
    file = str(run.config_file) if run is not None else name
    job = without_training_data(load(file, overrides))
    if run is not None:
        job = without_start(job)
    refuse_unused(job, overrides, command, of_run=run is not None, checkpoint=checkpoint)
    parts = sound(job)
    if not console.verbosity.quiet:
        show_findings(job, Severity.WARNING)
    if job.recipe is None:
        raise ConfigError("the file selects no recipe", where=job.name, help="add `recipe: NAME` to it")
    recipe = job.recipe
    check_installed()
    elsewhere = cluster_elsewhere(parts, file)
    if elsewhere is not None:
        raise RLinfError(
            "this machine is not one of the file's machines",
            where=job.name,
            help=f"run the same command on their head, `{elsewhere.nodes[0].host}`",
        )
    job = without_training_data(with_hub_pins(job, file, overrides, trains=False))
    job = without_start(job) if run is not None else job
    choose_cluster(sound(job), file, already_shown=True)
    return UsedJob(job, recipe, run)


def checkpoint_of(checkpoint: str | None, run: RunFolder | None) -> Path | None:
    """Return the given `global_step_N` folder, or the newest one of the run.

    Args:
        checkpoint: a `global_step_N` folder, its number in the run, or a run folder or its `checkpoints` for the newest
            checkpoint there.
        run: the run to search; None returns None if no checkpoint is given.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    if checkpoint is None:
        return None if run is None else run.checkpoints.require_sound().path
    path = Path(checkpoint)
    if checkpoint.isdigit() and run is not None and not path.exists():
        path = run.checkpoints.folder / f"global_step_{checkpoint}"
    if os.path.lexists(path / STATE):
        return RunFolder.open(path).checkpoints.require_sound().path
    newest = CheckpointStore(path).latest_sound()
    return sound_checkpoint(path).path if newest is None else newest.path


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
    """Evaluate a policy, and return its success; the exit code is 1 if episodes were left out.

    Raises:
        RLinfError: the recipe cannot evaluate, or the folder of the result exists.
    """
    used = used_job(file, overrides, "eval", checkpoint)
    function = used.recipe.load(used.recipe.evaluate)
    if function is None:
        raise RLinfError(f"recipe `{used.recipe.name}` does not support `rlinf eval`")
    weights = checkpoint_of(checkpoint, used.run)
    home = used.run.path / "evaluations" if used.run is not None else Path("evaluations")
    folder = out or unused_path(home, "pretrained" if weights is None else weights.name)
    if folder.exists():
        raise RLinfError("the result folder already exists", where=str(folder), help="name another with `-o`")
    # Before episodes that may take hours: a place that cannot be written is an error here.
    folder.mkdir(parents=True)
    folder.rmdir()
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
    named = [] if weights is None else [f"weights of {shown(weights)}"]
    return Result(
        partial(_shares if "sets" in result else _table, result),
        result,
        ExitCode.FAILED if result.get("left_out") else ExitCode.OK,
        (*_remarks(result), *recordings, *named, f"{folder / 'eval.json'}"),
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
    """Write a video of a policy, and return the outcomes of its episodes.

    Raises:
        RLinfError: the recipe cannot make videos.
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
    target = out or unused_path(home, f"play-{weights.name}", ".mp4")
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
    """Return remarks on metrics that are incomplete or misleading."""
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
    """Return a line for each task, and a line for all tasks."""
    rows: list[tuple[str, ...]] = []
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
    return console.table(("task", "episodes", "at end", "95 %", "once", "return", "length"), rows)


def _shares(result: Mapping[str, Any]) -> str:
    """Return a line for each data set of a language model's evaluation, and a line for all data sets."""
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
    rows: list[tuple[str, ...]] = []
    for name, figures in sets.items():
        shares = [text for share in names for text in _with_interval(figures, share)]
        counted = [_count(figures, count, of) for count, _ in counts]
        values = (f"{figures[other]:.4g}" if other in figures else "" for other in others)
        rows.append((name, f"{figures['problems']:.0f}", *shares, *values, *counted))
    return console.table(("data set", "problems", *columns), rows)


def _with_interval(figures: Mapping[str, float], name: str) -> tuple[str, str]:
    """Return a share and its interval; empty for a data set without answers."""
    if name not in figures:
        return "", ""
    return _share(figures[name]), f"{figures[f'{name}_low']:.3f}-{figures[f'{name}_high']:.3f}"


def _count(figures: Mapping[str, float], name: str, of: str) -> str:
    """Return `3 of 160` for `cut_off`, and the count alone for other names, which the total does not include."""
    count = f"{figures.get(name, 0):.0f}"
    return f"{count} of {figures[of]:.0f}" if name == "cut_off" else count


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def exported(run: str, kind: str, checkpoint: str | None, out: Path | None) -> Result:
    """Export a policy in a format, and return a description of the written files.

    Raises:
        RLinfError: the run or checkpoint does not exist, or the recipe has no export.
    """
    if (run_folder := find_run_folder(run)) is None:
        raise RunError("this is not a run folder", where=run, help="`rlinf runs` lists them")
    job = load_job(str(run_folder.config_file))
    if job.recipe is None or job.partial_config is None:
        job.raise_if_bad()
        raise RLinfError("the configuration of the run cannot be read", where=str(run_folder.config_file))
    if (function := job.recipe.load(job.recipe.export)) is None:
        raise RLinfError(f"recipe `{job.recipe.name}` has no export")
    weights = checkpoint_of(checkpoint, run_folder)
    assert weights is not None
    folder = out or run_folder.path / "exports" / f"{weights.name}-{kind}"
    step = load_manifest(weights).step
    record = {**function(job.partial_config, weights, folder, kind), "step": step}
    note_step(folder, step)
    return Result(partial(_text, record), {"schema": "rlinf.export/1", **record})


def _text(record: Mapping[str, Any]) -> str:
    lines = [f"{record['folder']}: {', '.join(record['files'])}", f"  step    {record['step']}"]
    for side in ("inputs", "outputs"):
        for name, tensor in record[side].items():
            shape = ", ".join(map(str, tensor["shape"]))
            lines.append(f"  {side[:-1]:6}  {name}  {tensor['dtype']} [{shape}]")
    if record["difference"] is None:
        lines.append("  not verified: onnxruntime is not installed")
    else:
        lines.append(f"  matches the policy within {record['difference']:.1g}")
    return "\n".join(lines)


def replayed(run: str | None, item: str) -> Result:
    """Return whether an item kills the process again.

    Args:
        run: the run's folder or name; None for the active one, else the last.
        item: a file in the run's `quarantine/`, or the name of such a file.

    Raises:
        RLinfError: the item does not exist, or items of its kind cannot be replayed.
    """
    folder = find_run(run)
    items = read_quarantine(folder.path)
    name = Path(item).name.removesuffix(".json")
    kept = items.get(f"{name}.json")
    if kept is None:
        names = [known.removesuffix(".json") for known in items]
        listed = f"quarantined: {quoted(names)}" if names else "the run has no quarantined items"
        raise RLinfError(f"there is no item `{name}`", where=str(folder.path), help=did_you_mean(name, names) or listed)
    used = used_job(str(folder.path), [], "why --replay", None) if kept.replay else None
    function = None if used is None else used.recipe.load(used.recipe.replay)
    if used is None or function is None:
        raise RLinfError(
            f"a {kept.kind} cannot be replayed alone",
            where=f"quarantine/{name}.json",
            help=f"look up {kept.kind} {kept.item} in the data by that number, and train with it alone",
        )
    words = function(used.job, kept, emit=console.message)
    return Result(
        words or f"Not reproduced: {kept.kind} {kept.item} ran without a crash.",
        {"schema": "rlinf.replay/1", "item": name, "died": bool(words), "words": words},
        ExitCode.FAILED if words else ExitCode.OK,
    )
