"""The live view of a run on a terminal: a block of a few lines, redrawn several times a second."""

from __future__ import annotations

import sys
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlinf_cli.console import guarded_stream, unguarded_stream
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import ENDING, View, line_of, processes, step_line, times
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners import events
from rlinf_core.suggest import replaced

_DRAWN_PER_SECOND = 4
_BAR = 24
# On a narrower terminal only one line is shown, because a block's lines would be truncated.
_WIDE = 80
# Events whose lines stay above the block.
_RESTARTS = (events.RunRestarted, events.WorkersRelaunched)
_LASTING = (events.RunStarted, events.Evaluated, events.CheckpointSaved, events.NodesChanged, *_RESTARTS)


class TerminalView(View):
    """The live view. Program output and lasting events scroll away above the block.

    Args:
        title: the title of the run, as in `embodied`.
        place: the run's folder, as displayed.
    """

    def __init__(self, progress: RunProgress, title: str, place: str) -> None:
        super().__init__(progress)
        self._title, self._place = title, place
        # Set before `Live` is created, because its constructor renders once.
        self._screen = Console(
            file=unguarded_stream(sys.stderr), highlight=False, markup=False, emoji=False, legacy_windows=False
        )
        self._live = Live(
            get_renderable=self._render,
            console=self._screen,
            refresh_per_second=_DRAWN_PER_SECOND,
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        # `Live` redirects the streams and restores them at the end, but it passes on more than colors.
        sys.stdout, sys.stderr = (guarded_stream(stream, True, hidden) for stream in (sys.stdout, sys.stderr))
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, event: events.Event) -> None:
        line = line_of(event, self.progress) if isinstance(event, _LASTING) else None
        if line is not None:
            style = "yellow" if isinstance(event, _RESTARTS) else ""
            self._screen.print(Text(replaced(hidden(line)), style=style))

    def _render(self) -> Group:
        with self.progress.lock:
            return block(self.progress, self._title, self._place, self._screen.width)


def block(progress: RunProgress, title: str, place: str, width: int = _WIDE) -> Group:
    """Return the current lines of the live view, truncated to the width; a narrow terminal gets a single line."""
    if width < _WIDE:
        now = _now(progress) if progress.started is None or progress.ending else Text(step_line(progress))
        return Group(_line(title, "bold", 0, now))
    rows = [("launch", _now(progress))] if progress.started is None else _rows(progress)
    head = Text(place)
    if progress.started is not None and progress.started.components:
        head.append(f"  {processes(progress.started)}", style="dim")
    longest = max(len(title), *(len(label) for label, _ in rows))
    return Group(_line(title, "bold", longest, head), *(_line(label, "dim", longest, text) for label, text in rows))


def _line(label: str, style: str, width: int, text: Text) -> Text:
    line = Text.assemble((label.ljust(width), style), "  ", text, no_wrap=True, overflow="ellipsis")
    # The view moves the cursor itself, so its stream does not escape.
    line.plain = replaced(hidden(line.plain))
    return line


def _rows(progress: RunProgress) -> list[tuple[str, Text]]:
    rows = [("step", _step(progress))]
    metrics = progress.metrics
    figures = {
        "train": _figures(labels.training(metrics), "bold"),
        "agents": _figures(labels.conversations(metrics)),
        "learn": _figures(labels.losses(metrics)),
    }
    rows += [(label, text) for label, text in figures.items() if text]
    step_seconds, shares = progress.shares()
    if step_seconds is not None:
        spent = [(labels.short_phase(name), f"{share:.0%}") for name, share in shares]
        rows.append(("time", Text(f"{labels.duration(step_seconds)} a step: ", style="dim") + _figures(spent)))
    work = progress.shares_of_components()
    if work:
        rows.append(("work", _work(work)))
    if progress.evaluation is not None:
        headline = labels.headlines(progress.evaluation.metrics, "eval")
        rows.append(("eval", _figures(headline, "green") + Text(f"  at step {progress.evaluation.step}", style="dim")))
    if progress.checkpoint is not None:
        rows.append(("saved", Text(progress.checkpoint.path.name)))
    if progress.restart is not None:
        restart = progress.restart
        text = f"{restart.restart} of {restart.max_restarts}: {restart.reason}"
        rows.append(("restart", Text(text, style="yellow")))
    rows.append(("now", _now(progress)))
    return rows


def _step(progress: RunProgress) -> Text:
    total = progress.total
    text = Text.assemble((f"{progress.step}" if total is None else f"{progress.step}/{total}", "bold"))
    if total:
        share = min(1.0, progress.step / total)
        filled = round(_BAR * share)
        text.append("  ")
        text.append("━" * filled, style="cyan")
        text.append("─" * (_BAR - filled), style="bright_black")
        text.append(f" {share:.0%}")
    if progress.steps_per_second is not None:
        text.append(f"  {labels.speed(progress.steps_per_second)}")
    return text.append(f"  {times(progress)}", style="dim")


def _figures(figures: list[tuple[str, str]], style: str = "") -> Text:
    """Return figures as in `success 0.72  return 12.3`, with the values in `style`."""
    text = Text()
    for index, (word, value) in enumerate(figures):
        text.append(f"{'  ' if index else ''}{word} ", style="dim")
        text.append(value, style=style)
    return text


def _work(components: dict[str, list[tuple[str, float]]]) -> Text:
    """Return the components' activities, as in `env: step 4%, wait 10%  rollout: policy 6%, wait 8%`."""
    text = Text()
    for index, (name, shares) in enumerate(components.items()):
        text.append(f"{'  ' if index else ''}{name}: ", style="dim")
        text.append(", ".join(f"{word} {share:.0%}" for word, share in shares))
    return text


def _now(progress: RunProgress) -> Text:
    if progress.ending:
        return Text(ENDING, style="yellow")
    waiting: Any = progress.waiting
    if waiting is not None:
        limit = f", at most {labels.duration(waiting.seconds)}" if waiting.seconds is not None else ""
        text = f"waiting for {waiting.what}, {labels.clock(progress.waiting_seconds)}{limit}"
        return Text(f"{text}\n{waiting.instead}" if waiting.instead else text)
    if not progress.phase:
        return Text("running")
    return Text(f"{labels.doing(progress.phase, progress.done)}, {labels.clock(progress.phase_seconds)}")
