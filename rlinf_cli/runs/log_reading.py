"""The output of `rlinf logs`: the ends of the logs of a run's processes, and what is added to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.log_files import ALL, Follower, LogFile, entries, log_files, merged, moment_of, tail
from rlinf_cli.runs.run_lookup import run_of_words
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.suggest import did_you_mean, quoted

_LOOK_EVERY = 0.2


def show_logs(words: Sequence[str], lines: int, *, follow: bool) -> Result:
    """Print the logs of a run, and with `follow` what is added to them until it ends.

    Args:
        words: a run, and components of it, as `actor`, `env:0`, or `:0` for a rank of each; see `run_of_words`.
        lines: the number of last lines, `ALL` for all.

    Raises:
        RunError: there is no such run, or it has no such logs.
    """
    folder, chosen = run_of_words(words, lambda run: {file.component for file in log_files(run.logs)})
    files = _chosen(folder, chosen, follow=follow)
    read = [tail(file.path, lines) for file in files]
    parts = merged(entries(last, moment_of(file.path)) for file, (last, _, _) in zip(files, read, strict=True))
    console.results(parts if lines == ALL else parts[-lines:] if lines else [])
    if not follow:
        return Result(notes=(_ending(folder, how="`--follow` continues" if folder.state.going_on else ""),))
    followers = {file.path: Follower(file.path, end) for file, (_, _, end) in zip(files, read, strict=True)}
    _follow(folder, chosen, followers)
    return Result(notes=(_ending(folder),))


def _matching(files: Iterable[LogFile], words: Sequence[str]) -> list[LogFile]:
    """Return the logs that words choose: those of any component named, of the ranks named for all."""
    named = [word.partition(":") for word in words if not word.startswith(":")]
    ranks = {word[1:] for word in words if word.startswith(":")}
    return [
        file
        for file in files
        if (not ranks or file.rank.split("_")[0] in ranks)
        and (
            not named
            or any(file.component == name and rank in ("", file.rank.split("_")[0]) for name, _, rank in named)
        )
    ]


def _chosen(folder: RunFolder, words: Sequence[str], *, follow: bool) -> list[LogFile]:
    files = log_files(folder.logs)
    chosen = _matching(files, words)
    if chosen or (follow and folder.state.going_on):
        return chosen
    if not files:
        raise RunError("this run has logged nothing", where=str(folder.path))
    components = sorted({file.component for file in files})
    unknown = next((name for word in words if (name := word.partition(":")[0]) and name not in components), None)
    if unknown is not None:
        raise RunError(
            f"this run has no log of `{unknown}`",
            where=str(folder.path),
            why="logs of workers on other machines stay there unless the run folder is on shared storage",
            help=did_you_mean(unknown, components) or f"it has logs of {quoted(components)}",
        )
    named = {word.partition(":")[0] for word in words} - {""}
    ranks = sorted({file.rank for file in files if not named or file.component in named}, key=lambda r: r.split("_"))
    asked = ", ".join(word.partition(":")[2] for word in words if ":" in word)
    raise RunError(
        f"this run has no log of rank {asked}", where=str(folder.path), help=f"it has logs of ranks {', '.join(ranks)}"
    )


def _follow(folder: RunFolder, words: Sequence[str], followers: dict[Path, Follower]) -> None:
    """Print appended lines, also of new files, until the run has ended."""
    while True:
        # Checked before reading, so that the last lines are printed.
        going_on = folder.refresh().going_on
        for file in _matching(log_files(folder.logs), words):
            followers.setdefault(file.path, Follower(file.path, 0))
        console.results(merged(entries(follower.read()) for follower in followers.values()))
        if not going_on:
            return
        time.sleep(_LOOK_EVERY)


def _ending(folder: RunFolder, how: str = "") -> str:
    """`runs/embodied-...: running, step 12 was the last; `--follow` continues`."""
    status, reason = folder.state.outcome
    text = f"{shown(folder.path)}: {status}, {f'step {folder.state.step}' if folder.state.step else 'no step'} done"
    return "; ".join(part for part in (text, reason, how) if part)
