"""The bundle of a run for a bug report: evidence, events, metrics, configuration and ends of logs as one tar.gz."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlinf_cli.runs.log_files import log_files
from rlinf_core.config.secrets import environment_secrets, mask_text
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import open_regular
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.evidence import bundle_folders
from rlinf_core.runners.storage.run_events import FILE as EVENTS

MOST_BYTES: Final = 20 << 20
_MOST_OF_A_FILE: Final = 1 << 20
_FILES: Final = (
    *("run.json", "config.yaml", EVENTS, "metrics.jsonl", "environment.json", "first_contact.json", "memory.json"),
    "placement.json",
)


def write_bundle(run: Path, path: Path, text: str, record: Mapping[str, Any]) -> list[str]:
    """Write the bundle of a run to `path`; return the names that did not fit.

    Files are read as bytes and within bounds: of a long one its end. Secret values that this process knows, and those
    after secret-looking names, are masked.

    Args:
        run: the run folder.
        path: the path of the bundle; a link itself is replaced.
        text: the page of `rlinf why`.
        record: the same as a record.

    Raises:
        RunError: it cannot be written.
    """
    remember(environment_secrets())
    left_out: list[str] = []
    buffer = io.BytesIO()
    size = 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        own = {"why.txt": f"{text}\n", "why.json": json.dumps(record, indent=2, ensure_ascii=False) + "\n"}
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
    """Yield names and contents, the most informative first."""
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
    # Stars for all that follows a secret-looking name would end JSON in the middle of a text.
    text = text if name.endswith((".json", ".jsonl")) else mask_text(text)
    return hidden(text).encode("utf-8", "backslashreplace")
