"""The logs of a run, one file per process: shown by `rlinf logs`, merged by time and followed; the driver's own."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.runs.run_lookup import run_of_words
from rlinf_core import env_vars
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import open_log, open_regular
from rlinf_core.process.known_secrets import hiding_formatter
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.suggest import did_you_mean, quoted

# The timestamp that starts a log line; timestamps sort by time as text.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_FILE = re.compile(r"rank_(\d+(?:_\d+)*)\.log")
_BLOCK = 64 * 1024
ALL = -1


class LogFile(NamedTuple):
    """The log of one process. `rank` is the process's rank; a child process appends its index, as in `0_1`."""

    component: str
    rank: str
    path: Path


class LogEntry(NamedTuple):
    """One log message: its first line and continuation lines."""

    moment: str
    lines: tuple[str, ...]


def log_files(folder: Path) -> list[LogFile]:
    """Return the logs in a run's `logs`, by component and rank."""
    files: list[LogFile] = []
    for path in folder.glob("*/rank_*.log"):
        match = _FILE.fullmatch(path.name)
        if match:
            files.append(LogFile(path.parent.name, match[1], path))
    return sorted(files, key=lambda file: (file.component, tuple(map(int, file.rank.split("_")))))


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a text file, `ALL` for all lines; empty if the file cannot be read."""
    lines, rest, _ = tail(path, count)
    if rest:
        lines.append(rest)
    return lines if count == ALL else lines[-count:] if count else []


def tail(path: Path, count: int) -> tuple[list[str], str, int]:
    """Return the last complete lines of a file, the incomplete rest, and the offset after the last complete line."""
    blocks: list[bytes] = []
    line_ends = 0
    try:
        with open_regular(path) as file:
            at = end = file.seek(0, 2)
            while at > 0 and (count == ALL or line_ends <= count):
                start = max(0, at - _BLOCK)
                file.seek(start)
                blocks.append(file.read(at - start))
                line_ends += blocks[-1].count(b"\n")
                at = start
    except OSError:
        return [], "", 0
    *lines, rest = b"".join(reversed(blocks)).split(b"\n")
    kept = lines if count == ALL else lines[-count:] if count else []
    return [_text(line) for line in kept], _text(rest), end - len(rest)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


def entries(lines: Sequence[str], fallback: str = "") -> list[LogEntry]:
    """Group lines into messages; a line without a timestamp belongs to the message before it.

    Args:
        fallback: the timestamp for leading lines without a timestamp.
    """
    messages: list[LogEntry] = []
    moment, part = fallback, list[str]()
    for line in lines:
        match = _MOMENT.match(line)
        if match and part:
            messages.append(LogEntry(moment, tuple(part)))
            part = []
        moment = match[0] if match else moment
        part.append(line)
    return [*messages, LogEntry(moment, tuple(part))] if part else messages


def merged(parts: Iterable[Sequence[LogEntry]]) -> list[str]:
    """Return the lines of several logs by time; the order within a log is kept."""
    together = sorted((entry for part in parts for entry in part), key=lambda entry: entry.moment)
    return [line for entry in together for line in entry.lines]


def moment_of(path: Path) -> str:
    """Return a file's modification time in the loggers' format; empty if the file is gone."""
    try:
        changed = path.stat().st_mtime
    except OSError:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed)) + f",{int(changed % 1 * 1000):03} "


class Follower:
    """A reader of the complete lines appended to a file.

    Args:
        at: the start offset in bytes.
    """

    def __init__(self, path: Path, at: int) -> None:
        self.path = path
        self._at = at
        self._rest = b""

    @property
    def rest(self) -> str:
        """The incomplete last line at the last call of `read`."""
        return _text(self._rest)

    def read(self) -> list[str]:
        """Return the lines completed since the last call."""
        try:
            with open_regular(self.path) as file:
                if file.seek(0, 2) < self._at:
                    # The file was truncated.
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [_text(line) for line in complete]


_LOOK_EVERY = 0.2


def show_logs(words: Sequence[str], lines: int, *, follow: bool) -> Result:
    """Print the logs of a run; with `follow`, also print new lines until the run ends.

    Args:
        words: a run, and its components, as in `actor`, `env:0`, or `:0` for a rank of each; see `run_of_words`.
        lines: the number of last lines, `ALL` for all lines.

    Raises:
        RunError: the run or its logs do not exist.
    """
    folder, chosen = run_of_words(words, lambda run: {file.component for file in log_files(run.logs)})
    files = _chosen(folder, chosen, follow=follow)
    read = [tail(file.path, lines) for file in files]
    # When following, an incomplete last line is printed once it is complete.
    shown_lines = [[*last, *([rest] if rest and not follow else [])] for last, rest, _ in read]
    parts = merged(entries(last, moment_of(file.path)) for file, last in zip(files, shown_lines, strict=True))
    console.results(parts if lines == ALL else parts[-lines:] if lines else [])
    if not follow:
        return Result(notes=(_ending(folder, how="`--follow` continues" if folder.state.going_on else ""),))
    followers = {file.path: Follower(file.path, end) for file, (_, _, end) in zip(files, read, strict=True)}
    _follow(folder, chosen, followers)
    return Result(notes=(_ending(folder),))


def _matching(files: Iterable[LogFile], words: Sequence[str]) -> list[LogFile]:
    """Return the logs that match one of the named components, if any, and one of the ranks `:N`, if any."""
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
        f"this run has no log of rank {asked}", where=str(folder.path), help=f"ranks that have logs: {', '.join(ranks)}"
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
            console.results(follower.rest for follower in followers.values() if follower.rest)
            return
        time.sleep(_LOOK_EVERY)


def _ending(folder: RunFolder, how: str = "") -> str:
    """Return the last line, as in `runs/embodied-...: running, step 12 done; `--follow` continues`."""
    status, reason = folder.state.outcome
    text = f"{shown(folder.path)}: {status}, {f'step {folder.state.step}' if folder.state.step else 'no step'} done"
    return "; ".join(part for part in (text, reason, how) if part)


LOGGER = logging.getLogger("rlinf")
# The driver's component name in the run folder.
DRIVER = "driver"
# The component name for the output of a detached run and its workers.
PRINTED = "output"


def open_log_of(file: Path) -> int:
    """Open a log of a run, `RUN/logs/COMPONENT/rank_N.log`, for appending; create it with its folders.

    Raises:
        OSError: the file cannot be opened, or is a link.
    """
    run = file.parents[2]
    return open_log(run, str(file.relative_to(run)))


class _Screen(logging.Handler):
    """A log handler that writes to the console."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        console.message(f"{console.style(record.levelname.lower(), style)}: {record.getMessage()}")


class _LogFileHandler(logging.FileHandler):
    """A log handler for the file. A write error is reported once; logging would print a traceback for every line."""

    _reported = False

    def _open(self) -> TextIOWrapper:
        return os.fdopen(open_log_of(Path(self.baseFilename)), "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._reported:
            self._reported = True
            console.error(f"{self.baseFilename} can no longer be written: {sys.exc_info()[1]}")


@contextmanager
def driver_log(file: Path) -> Generator[logging.Logger, None, None]:
    """Log this process's records to `file` within the block, in the workers' format; print warnings and errors, too."""
    os.close(open_log_of(file))
    writer = _LogFileHandler(file, encoding="utf-8")
    writer.setFormatter(hiding_formatter(f"%(asctime)s %(levelname)s [{DRIVER}] %(message)s"))
    earlier = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:] = [writer, _Screen(logging.WARNING)]
    LOGGER.setLevel(env_vars.LOG_LEVEL.get())
    LOGGER.propagate = False
    try:
        yield LOGGER
    finally:
        LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = earlier
        writer.close()
