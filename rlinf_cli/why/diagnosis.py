"""The diagnosis of a run (failures, consequences, reasons for not learning, slow steps) as text, data, and bundle."""

from __future__ import annotations

import gzip
import io
import shlex
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.runs.active import Inspector, job_of
from rlinf_cli.runs.logs import log_files
from rlinf_cli.runs.metric_columns import MATTERS
from rlinf_cli.runs.run_lookup import find_run
from rlinf_cli.runs.run_table import rows_of
from rlinf_cli.why.facts import Incident, RunFacts, incidents, read_facts, seconds_without_step
from rlinf_cli.why.findings import FindingKind, RunFinding, causes, named_failure
from rlinf_cli.why.signs import signs
from rlinf_core.config.secrets import environment_secrets, mask_text
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import open_regular, write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.step_clock import NO_STEP, SURE_AFTER
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_events import EVENTS, bundle_folders
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.suggest import clipped
from rlinf_core.supervision.job_view import held_up

# The code of the finding about items that were set aside.
_SET_ASIDE: Final = "items-set-aside"


def slow_steps(facts: RunFacts) -> list[RunFinding]:
    """Return findings on waits of the steps: components that leave hardware idle, and the longest answers."""
    findings: list[RunFinding] = []
    waits = [wait for wait in facts.waits if wait.matters]
    if waits:
        others = [f"{wait.words} (`{wait.source}`)" for wait in waits[1:]]
        evidence = (f"`{waits[0].source}`, the newest 100 steps", *others)
        do = f"{_advice(facts)} predicts the steps of every other placement"
        findings.append(RunFinding(FindingKind.SPEED, "idle-hardware", waits[0].words, evidence, (do,)))
    tail = facts.tail
    if tail is not None and tail.matters:
        ahead = f"{facts.number('runner.max_staleness') or 1:.0f}"
        do = f"{_advice(facts, '--staleness', ahead)} predicts what rollouts gain that go on meanwhile"
        evidence = (f"profile.json: {tail.lengths}",)
        findings.append(RunFinding(FindingKind.SPEED, "long-tail", tail.cost, evidence, (do,)))
    return findings


def _advice(facts: RunFacts, *options: str) -> str:
    run = shown(facts.path)
    return f"`{shlex.join(['rlinf', 'inspect', 'placement', run, '--advise', run, *options])}`"


class Diagnosis(NamedTuple):
    """The findings of `rlinf why` about a run.

    Attributes:
        failures: each failure with its incident, oldest first; after each but the last, the run was restarted.
        learning: the root causes why the run does not learn, or learns something else than it should.
        restarts: the incidents after which processes were started again.
        speed: the waits of the steps that exceed the error of a prediction; they are no faults.
    """

    facts: RunFacts
    failures: Sequence[tuple[Incident, RunFinding]]
    learning: Sequence[RunFinding]
    restarts: Sequence[Incident] = ()
    speed: Sequence[RunFinding] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.learning

    @property
    def repeated(self) -> tuple[str, int] | None:
        """The process that failed most often, with the number of its failures; None if no process failed twice."""
        others = (incident for incident, finding in self.failures if finding.code != _SET_ASIDE)
        names = [incident.process.name for incident in others if incident.process is not None]
        counts = {name: names.count(name) for name in names}
        name = max(counts, key=counts.__getitem__, default="")
        return (name, counts[name]) if name and counts[name] > 1 else None


def diagnose(facts: RunFacts) -> Diagnosis:
    """Return the causes that the rules find in the facts about a run."""
    failures = [(incident, named_failure(incident)) for incident in incidents(facts)]
    findings = [finding for sign in signs() if (finding := sign.finding(facts)) is not None]
    codes = {finding.code for finding in findings} | {finding.code for _, finding in failures}
    implied = {follower for code in codes for follower in causes()["follows"].get(code, ())}
    ended = {finding.code for _, finding in failures}
    learning = [finding for finding in findings if finding.code not in implied | ended]
    restarts = [incident for incident, _ in failures if incident.alone or incident.restarted]
    return Diagnosis(facts, *_items_first(facts, failures, learning), restarts, slow_steps(facts))


def _items_first(
    facts: RunFacts, failures: Sequence[tuple[Incident, RunFinding]], learning: Sequence[RunFinding]
) -> tuple[list[tuple[Incident, RunFinding]], list[RunFinding]]:
    """Return failures and findings, in which an item that was set aside replaces the deaths that it caused."""
    aside = next((finding for finding in learning if finding.code == _SET_ASIDE), None)
    deaths = [death for item in facts.quarantined.values() for death in item.deaths]
    caused = [
        pair for pair in failures if not pair[0].ended and any(death in pair[0].text for death in deaths if death)
    ]
    if aside is None or not caused:
        return list(failures), list(learning)
    incident, _ = caused[0]
    followed = tuple(f"{finding.what}, after step {finding.step}" for _, finding in caused)
    first = replace(aside, kind=FindingKind.FAILURE, followed=followed, step=incident.step)
    kept = [
        (incident, first) if pair is caused[0] else pair for pair in failures if pair is caused[0] or pair not in caused
    ]
    return kept, [finding for finding in learning if finding is not aside]


SCHEMA: Final = "rlinf.why/1"
_MOST_FOLLOWED: Final = 12
_MOST_WAITS: Final = 3
_TITLES: Final = {
    FindingKind.FAILURE: "what failed first",
    FindingKind.INTERRUPTION: "what ended it",
    FindingKind.STANDSTILL: "why it does not go on",
    FindingKind.LEARNING: "why it does not learn",
    FindingKind.FIGURES: "what its figures lack",
    FindingKind.SPEED: "what its steps wait for",
}


def why_text(diagnosis: Diagnosis, name: str) -> str:
    """Return the page: the first failure, its consequences, evidence and remedy, and why the run does not learn.

    Args:
        name: the name of the run as the user writes it.
    """
    facts = diagnosis.facts
    lines = [f"{name}: {_status(diagnosis)}"]
    if diagnosis.failures:
        incident, first = diagnosis.failures[0]
        lines += ["", _TITLES[first.kind], *_finding(first, _moment(incident))]
        lines += _followed(diagnosis)
        lines += _last(diagnosis)
    before = None
    for cause in diagnosis.learning:
        since = f"  (since step {cause.step})" if cause.step is not None else ""
        title = "and" if cause.kind is before else _TITLES[cause.kind]
        lines, before = [*lines, "", title, *_finding(cause, since)], cause.kind
    if diagnosis.clean:
        lines += ["", "No problem found. `rlinf compare` shows how another run differs."]
    lines += _waits(diagnosis)
    if facts.notes:
        lines += ["", "what could not be read or used", *(f"  {note}" for note in facts.notes)]
    return clipped("\n".join(lines))


def _waits(diagnosis: Diagnosis) -> list[str]:
    """Return lines on the waits of the steps: the findings with remedies if there are any, else the longer waits."""
    facts = diagnosis.facts
    if diagnosis.speed:
        return ["", _TITLES[FindingKind.SPEED], *(line for one in diagnosis.speed for line in _finding(one, ""))]
    shown = [wait.words for wait in facts.waits if wait.share >= MATTERS][:_MOST_WAITS]
    shown += [] if facts.tail is None else [f"{facts.tail.cost}; {facts.tail.lengths}"]
    return ["", _TITLES[FindingKind.SPEED], *(f"  {line}" for line in shown)] if shown else []


def why_brief(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the causes for the last lines of a run, each as a label and one line.

    The failures of a run that finished nevertheless are left out.
    """
    lines: list[tuple[str, str]] = []
    if diagnosis.failures and diagnosis.facts.status != RunStatus.FINISHED:
        incident, first = diagnosis.failures[0]
        lines.append(("cause", f"{first.what}{_moment(incident)}"))
        if _last(diagnosis):
            lines.append(("at the end", diagnosis.failures[-1][1].what))
    return [*lines, *((finding.kind.value, finding.what) for finding in diagnosis.learning)]


def why_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the page as a record, `rlinf.why/1`."""
    facts = diagnosis.facts
    return {
        "schema": SCHEMA,
        "run": str(facts.path),
        "status": facts.status,
        "step": facts.step,
        "reason": facts.reason,
        "clean": diagnosis.clean,
        "failures": [
            {**_record(finding), "ended_run": incident.ended, "source": incident.source}
            for incident, finding in diagnosis.failures
        ],
        "learning": [_record(finding) for finding in diagnosis.learning],
        "speed": [_record(finding) for finding in diagnosis.speed],
        "waits": [{**wait._asdict(), "share": round(wait.share, 3)} for wait in facts.waits],
        "answer_lengths": None if facts.tail is None else facts.tail._asdict(),
        "notes": list(facts.notes),
    }


def _record(finding: RunFinding) -> dict[str, Any]:
    return {**asdict(finding), "what": clipped(finding.what), "evidence": [*map(clipped, finding.evidence)]}


def _status(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    reason = f": {facts.reason}" if facts.reason else ""
    if facts.status == RunStatus.RUNNING:
        return f"it is active, at step {facts.step}{reason}"
    return f"{facts.status} after step {facts.step}{reason}"


def _moment(incident: Incident) -> str:
    at = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(incident.time))}, " if incident.time is not None else ""
    return f"  ({at}after step {incident.step})"


def _finding(finding: RunFinding, when: str) -> Iterable[str]:
    yield f"  {finding.what}{when}"
    yield from (f"    {line}" for line in finding.evidence)
    yield from (f"    do: {line}" for line in finding.do)


def _followed(diagnosis: Diagnosis) -> list[str]:
    """Return lines on the consequences of the first failure, and on later failures and restarts."""
    (_, first), *later = diagnosis.failures
    lines = [f"  {text}" for text in first.followed[:_MOST_FOLLOWED]]
    if len(first.followed) > _MOST_FOLLOWED:
        lines.append(f"  and {len(first.followed) - _MOST_FOLLOWED} more")
    # Leave out the last failure if it is shown in full below.
    named = later[:-1] if _last(diagnosis) else later
    lines += [f"  {finding.what}{_moment(incident)}" for incident, finding in named]
    lines += [f"  {line}" for line in _restarts(diagnosis.restarts, ended=diagnosis.failures[-1][0].ended)]
    repeated = diagnosis.repeated
    if repeated is not None:
        lines.append(f"  `{repeated[0]}` failed {repeated[1]} times: look at what it was given each time")
    return ["", "what followed", *lines] if lines else []


def _restarts(restarts: Sequence[Incident], *, ended: bool) -> list[str]:
    alone = sum(incident.alone for incident in restarts)
    whole = len(restarts) - alone
    end = "and then ended" if ended else "and went on"
    lines: list[str] = []
    if alone:
        lines.append(f"what had died was started again alone {_times(alone)}" + ("" if whole else f", {end}"))
    if whole:
        lines.append(f"the run was started again {_times(whole)} from its last checkpoint, {end}")
    return lines


def _times(count: int) -> str:
    return f"{count} time{'s' if count > 1 else ''}"


def _last(diagnosis: Diagnosis) -> list[str]:
    """Return the full lines of the failure that ended the run, unless it is the first failure or has its cause."""
    incident, last = diagnosis.failures[-1]
    first = diagnosis.failures[0][1]
    if len(diagnosis.failures) == 1 or incident.restarted or incident.alone or last.code == first.code:
        return []
    title = _TITLES[last.kind] if last.kind is FindingKind.STANDSTILL else "what ended it"
    return ["", title, *_finding(last, _moment(incident))]


_MOST_BYTES: Final = 20 << 20
_MOST_OF_A_FILE: Final = 1 << 20
_FILES: Final = (
    *("run.json", "config.yaml", EVENTS, "metrics.jsonl", "environment.json", "first_contact.json", "memory.json"),
    *("placement.json", "profile.json"),
)


def _write_bundle(run: Path, path: Path, text: str, record: Mapping[str, Any]) -> list[str]:
    """Write the bundle of a run to `path`; return the names of files that did not fit.

    Files are read as bytes; only the end of a long file is read. Secret values that this process knows are masked, and
    so are values after secret-looking names.

    Args:
        run: the run folder.
        path: the path of the bundle; a link there is replaced, not followed.
        text: the page of `rlinf why`.
        record: the record of `rlinf why`.

    Raises:
        RunError: the bundle cannot be written.
    """
    remember(environment_secrets())
    left_out: list[str] = []
    buffer = io.BytesIO()
    size = 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        own = {"why.txt": f"{text}\n", "why.json": f"{console.json_text(record)}\n"}
        parts = [(name, content.encode("utf-8", "backslashreplace")) for name, content in own.items()]
        for name, content in (*parts, *_files(run)):
            masked = _masked(name, content)
            if size + len(masked) > _MOST_BYTES:
                left_out.append(name)
                continue
            size += len(masked)
            info = tarfile.TarInfo(f"{run.name}/{name}")
            info.size, info.mtime, info.mode = len(masked), int(time.time()), 0o644
            archive.addfile(info, io.BytesIO(masked))
    try:
        durable.write_whole(path.absolute(), buffer.getvalue(), mode=0o600)
    except OSError as error:
        raise RunError("the bundle cannot be written", where=str(path), why=write_fault(path, error)) from error
    return left_out


def _files(run: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of files, the most informative first."""
    folders = bundle_folders(run)
    evidence = [path for folder in folders for path in sorted(folder.rglob("*"))]
    logs = [file.path for file in log_files(run / "logs")]
    for path in (*(run / name for name in _FILES), *evidence, *logs):
        try:
            content = _end_of(path)
        except OSError:
            continue  # a folder, a link to nowhere, a pipe
        yield str(path.relative_to(run)), content


def _end_of(path: Path) -> bytes:
    if path.is_symlink():
        raise OSError("a link")
    with open_regular(path) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - _MOST_OF_A_FILE))
        return file.read(_MOST_OF_A_FILE)


def _masked(name: str, content: bytes) -> bytes:
    text = content.decode("utf-8", "backslashreplace")
    # Masking the rest of a line after a secret-looking name would break JSON.
    text = text if name.endswith((".json", ".jsonl")) else mask_text(text)
    return hidden(text).encode("utf-8", "backslashreplace")


def explained(run: str | None, bundle: Path | None) -> Result:
    """Return the diagnosis of a run.

    Args:
        run: the run's folder or name; None for the active run, else the last one.
        bundle: the file to which the run's evidence is written, or None.
    """
    folder = find_run(run)
    facts = read_facts(folder)
    waited = seconds_without_step(facts)
    # If the driver has logged the reason already, do not ask the processes again.
    if waited is not None and not any(NO_STEP in line for line in facts.warnings):
        facts = replace(facts, held_up=_held_up(folder, certain_only=waited < SURE_AFTER))
    diagnosis = diagnose(facts)
    record = why_record(diagnosis)
    text = why_text(diagnosis, shown(folder.path))
    code = ExitCode.OK if diagnosis.clean else ExitCode.FAILED
    if bundle is None:
        return Result(text, record, code)
    for name in _write_bundle(folder.path, bundle, text, record):
        console.warn(f"{name} is not in {shown(bundle)}")
    record["bundle"] = str(bundle)
    return Result(text, record, code, (f"bundle: {shown(bundle)}; look through it before you publish it",))


def summary(run: str | None) -> Result:
    """Return the outcome of a run in a few lines."""
    folder = find_run(run)
    (row,) = rows_of([folder])
    diagnosis = diagnose(read_facts(folder))
    lines = [
        ("run", shown(folder.path)),
        ("recipe", folder.state.recipe),
        ("status", f"{row.status}: {row.reason}" if row.reason else str(row.status)),
        ("step", str(folder.state.step)),
        *([("result", row.result)] if row.result else []),
        *why_brief(diagnosis),
        *(("speed", finding.what) for finding in diagnosis.speed),
    ]
    width = max(len(label) for label, _ in lines)
    return Result("\n".join(f"{label.ljust(width)}  {text}" for label, text in lines), row.record())


def _held_up(folder: RunFolder, *, certain_only: bool) -> list[str]:
    """Return descriptions of the processes that hold up an active run; empty if the run is on another machine, or its
    manager does not answer."""
    try:
        with Inspector(job_of(folder)) as inspector:
            return [standing.how for standing in held_up(inspector, certain_only=certain_only)]
    except (RLinfError, OSError):
        return []
