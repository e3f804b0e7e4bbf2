"""The answer of `rlinf why` about a run, its bundle for a bug report, and the summary of `rlinf report --text`."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlinf_cli.cluster.jobs import Inspector, job_of
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.logs import log_files
from rlinf_cli.runs.run_lookup import find_run
from rlinf_cli.runs.run_table import rows_of
from rlinf_cli.why.diagnosis import diagnose, why_brief, why_record, why_text
from rlinf_cli.why.facts import read_facts
from rlinf_cli.why.incidents import seconds_without_step
from rlinf_core.config.secrets import environment_secrets, mask_text
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import open_regular, write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.step_clock import NO_STEP, SURE_AFTER
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.evidence import bundle_folders
from rlinf_core.runners.storage.run_events import FILE as EVENTS
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.supervision.verdicts import held_up

MOST_BYTES: Final = 20 << 20
_MOST_OF_A_FILE: Final = 1 << 20
_FILES: Final = (
    *("run.json", "config.yaml", EVENTS, "metrics.jsonl", "environment.json", "first_contact.json", "memory.json"),
    *("placement.json", "profile.json"),
)


def write_bundle(run: Path, path: Path, text: str, record: Mapping[str, Any]) -> list[str]:
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
            if size + len(masked) > MOST_BYTES:
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
    for name in write_bundle(folder.path, bundle, text, record):
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
