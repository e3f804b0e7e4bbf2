"""Keeping evidence: one bundle for each failure, whole or not at all, bounded in size and number."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_core.config.secrets import environment_secrets
from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.foreign.files import make_folder
from rlinf_core.process.known_secrets import remember
from rlinf_core.runners.evidence import parts
from rlinf_core.runners.recovery.failure_list import Failure, failures_of, position, reason_of
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.evidence import (
    FAILURE,
    FOLDER,
    MOST_BUNDLES,
    MOST_BYTES,
    MOST_FILE_BYTES,
    SCHEMA,
    EvidenceFile,
    FailedProcess,
    bundle_folders,
)

LOGGER = logging.getLogger("rlinf")
# The first failures are the most informative: what followed may be due to them.
_FIRST_BUNDLES: Final = 2
_MOST_TEXT: Final = 64 << 10
_MOST_FAILURES: Final = 200
# Where an error has been kept; one that is raised on is not kept twice.
_KEPT: Final = "rlinf_evidence"


def keep_evidence(
    run: Path, error: BaseException, step: int, components: Mapping[str, str] | None = None
) -> Path | None:
    """Keep evidence of a failure in the run folder `run`; return its folder, also if this error was kept before.

    It takes a second at most where processes are busy. A part that cannot be collected is named in `failure.json`.
    Nothing is raised: evidence must not hide the failure.

    Args:
        run: the run folder.
        error: the failure, as raised in the driver.
        step: the last finished step.
        components: the component of each worker group.

    Returns:
        The folder; None if nothing could be written.
    """
    kept = vars(error).get(_KEPT)
    if isinstance(kept, Path):
        return kept
    try:
        folder = _write(run, error, step, components or {})
    except (OSError, RLinfError, ValueError) as failure:
        LOGGER.warning("no evidence of the failure was kept: %s", failure)
        return None
    vars(error)[_KEPT] = folder
    return folder


def evidence_line(folder: Path | None) -> list[str]:
    """Return the line of an event's details that names a folder of evidence; none without one."""
    return [] if folder is None else [f"evidence: {FOLDER}/{folder.name}"]


def failed_processes(error: BaseException, components: Mapping[str, str]) -> list[FailedProcess]:
    """Return everything about the failures in an error, root causes first."""
    return [_failed(failure, components) for failure in failures_of(error)[:_MOST_FAILURES]]


def _failed(failure: Failure, components: Mapping[str, str]) -> FailedProcess:
    error = failure.error
    own = isinstance(error, RLinfError)
    end = error.end if isinstance(error, WorkerDiedError) else None
    died = isinstance(error, WorkerDiedError) and error.address == failure.name
    fields: dict[str, Any] = {
        "name": failure.name,
        "component": None if failure.group is None else components.get(failure.group, failure.group),
        "rank": failure.rank,
        "method": failure.method,
        "place": failure.place,
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "bases": [base.__name__ for base in type(error).__mro__[:-1]],
        "text": _short(str(error)),
        "traceback": _short("".join(traceback.format_exception(error))),
        "why": _short(error.why or "") if own else "",
        "help": _short(error.help or "") if own else "",
        "position": position(error) or "",
        "consequence": failure.consequence,
        "died": died,
    }
    if died and end is not None:
        fields |= end._asdict()
    return FailedProcess.model_validate(parts.masked(fields))


def _write(run: Path, error: BaseException, step: int, components: Mapping[str, str]) -> Path:
    remember(environment_secrets())
    missing: list[str] = []
    try:
        snapshot = parts.snapshot()
    except RLinfError as failure:
        snapshot = None
        missing.append(f"waits, stacks: {failure.message}")
    scene = parts.FailureScene(run, failed_processes(error, components), snapshot)
    make_folder(run / FOLDER)
    name = _free_name(run / FOLDER)
    aside = run / FOLDER / f".{name}.{os.getpid()}.part"
    aside.mkdir(mode=0o700)
    try:
        left = MOST_BYTES - MOST_FILE_BYTES
        for file, text in _collected(scene, missing):
            content = text.encode("utf-8", "backslashreplace")[-MOST_FILE_BYTES:]
            if len(content) > left:
                missing.append(f"{file}: the bundle is full")
                continue
            left -= len(content)
            path = aside / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        evidence = EvidenceFile.model_validate(
            {
                "schema": SCHEMA,
                "time": time.time(),
                "step": step,
                "what": parts.masked(reason_of(error)),
                "failures": list(scene.failures),
                "missing": parts.masked(missing),
            }
        )
        (aside / FAILURE).write_text(evidence.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        durable.sync_tree(aside)
        durable.rename(aside, run / FOLDER / name)
    except BaseException:
        durable.remove_tree(aside)
        raise
    for surplus in _surplus(bundle_folders(run)):
        durable.remove_tree(surplus)
    return run / FOLDER / name


def _collected(scene: parts.FailureScene, missing: list[str]) -> Iterator[tuple[str, str]]:
    for part in parts.ALL:
        try:
            yield from part(scene)
        except Exception as failure:  # noqa: BLE001 - Ray, /proc and other people's files fail in their own ways
            missing.append(f"{part.__name__}: {type(failure).__name__}: {failure}")


def _surplus(folders: Sequence[Path]) -> Sequence[Path]:
    """Return the bundles to be removed: neither of the first failures nor of the newest."""
    return folders[_FIRST_BUNDLES : len(folders) - MOST_BUNDLES + _FIRST_BUNDLES] if len(folders) > MOST_BUNDLES else ()


def _free_name(folder: Path) -> str:
    """Return a name that sorts after all that are there: that of a bundle that was removed is not used again."""
    base = time.strftime("%Y%m%d-%H%M%S")
    numbers = [entry.name.removeprefix(base) for entry in os.scandir(folder) if entry.name.startswith(base)]
    last = max((int(number[1:]) if number[1:].isdigit() else 1 for number in numbers), default=0)
    return f"{base}-{last + 1:03}" if last else base


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[: _MOST_TEXT // 2]}\n... {len(text) - _MOST_TEXT} characters ...\n{text[-_MOST_TEXT // 2 :]}"
