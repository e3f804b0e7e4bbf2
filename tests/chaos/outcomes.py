"""The outcome of a run, read from its folder once it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_cli.why.diagnosis import diagnose
from rlinf_cli.why.facts import read_facts
from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.chaos.started_run import OUTPUT
from tests.chaos.strike_plan import Strike

# What a process prints when rlinf itself has a fault.
_BUGS: Final = ("this is a bug in rlinf", "Traceback (most recent call last)", "Fatal Python error")


class Struck(NamedTuple):
    """A strike that was tried.

    Attributes:
        victim, pid: the process that was hit; empty where there was none of its kind at that moment.
        time: the time in seconds since 1970.
        step: the last finished step then.
        named: the seconds after which a stopped process was named.
        gone: whether it ended while it was stopped, as by a restart that an earlier strike caused.
        event, seconds: what the run reported of it next, and after how many seconds.
    """

    strike: Strike
    victim: str
    pid: int
    time: float
    step: int
    named: float | None = None
    gone: bool = False
    event: str = ""
    seconds: float | None = None


class RunEnding(NamedTuple):
    """The end of a run, and what it left behind.

    Attributes:
        code: the exit code of its last command; None where it hung.
        status: the status, as `rlinf runs` shows it.
        steps: the steps in its metrics, in order.
        metrics: the metrics of each step, without times.
        digests: the digests of the files of its last checkpoint, with the step in front.
        why: codes and words of `rlinf why`.
        left: processes and folders that outlived it.
        bugs: lines of its output that no user should see.
        seconds: the seconds from its first command to its end.
    """

    code: int | None
    status: str
    reason: str
    steps: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]
    digests: Mapping[str, str]
    why: tuple[tuple[str, str], ...]
    struck: tuple[Struck, ...]
    left: tuple[str, ...]
    bugs: tuple[str, ...]
    seconds: float

    @property
    def hit(self) -> list[Struck]:
        """The strikes that hit a process."""
        return [struck for struck in self.struck if struck.victim]


def outcome_of(
    folder: Path, code: int | None, struck: Sequence[Struck] = (), left: Sequence[str] = (), seconds: float = 0.0
) -> RunEnding:
    """Return the outcome of the run in a folder of `StartedRun`.

    Args:
        code: the exit code of its last command; None where it hung.
    """
    run = RunFolder.latest(folder)
    text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    bugs = tuple(line for line in text.splitlines() if any(words in line for words in _BUGS))
    if run is None:
        last = text.strip().splitlines()[-1:] or [""]
        return RunEnding(code, "no run", last[0], (), (), {}, (), tuple(struck), tuple(left), bugs, seconds)
    facts = read_facts(run)
    lines = [line for line in read_metrics(run.metrics_file) if line.step]
    newest = run.checkpoints.latest()
    digests = (
        {} if newest is None else {f"{newest.step}/{name}": text for name, text in newest.manifest.digests.items()}
    )
    why = [(finding.code, "\n".join((finding.what, *finding.evidence))) for _, finding in diagnose(facts).failures]
    return RunEnding(
        code,
        facts.status,
        facts.reason,
        tuple(line.step for line in lines),
        tuple(line.metrics for line in lines),
        digests,
        tuple(why),
        tuple(struck),
        tuple(left),
        bugs,
        seconds,
    )
