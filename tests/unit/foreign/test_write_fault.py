"""Words for a failed write."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_core.errors import RemoteError
from rlinf_core.foreign.write_fault import lacks_room, write_fault

MIB = 1 << 20
GIB = 1 << 30


def of_disk(monkeypatch: pytest.MonkeyPatch, free: float, total: float, files: int = 100) -> None:
    disk = SimpleNamespace(f_frsize=1, f_bavail=free, f_blocks=total, f_files=1000, f_favail=files)

    def statvfs(_: object) -> SimpleNamespace:
        return disk

    monkeypatch.setattr(os, "statvfs", statvfs)


def full(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [
        (0.3 * MIB, 9 * MIB, "the disk has 0.3 of 9 MiB free"),
        (0, 0.5 * MIB, "the disk has 0.0 of 0.5 MiB free"),
        (3 * MIB, 252 * GIB, "the disk has 3.0 MiB of 252 GiB free"),
        (41.5 * GIB, 1000 * GIB, "the disk has 41.5 of 1000 GiB free"),
    ],
)
def test_a_full_disk_is_told_with_its_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, total: float, words: str
) -> None:
    of_disk(monkeypatch, free, total)
    # Also of a file that has not been created.
    assert write_fault(tmp_path / "no" / "file", full()) == f"No space left on device: {words}"


def test_errors_that_lost_their_number_are_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_disk(monkeypatch, 0.3 * MIB, 9 * MIB)
    torch = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    numpy = OSError("8000 requested and 512 written")
    safetensors = ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    several = ExceptionGroup("two ranks failed", [ValueError("another"), pickle.loads(pickle.dumps(torch))])
    for error in (
        torch,
        numpy,
        safetensors,
        several,
        RemoteError("builtins.OSError", "[Errno 28] No space left on device"),
    ):
        assert lacks_room(error), error
        assert write_fault(tmp_path, error) == "No space left on device: the disk has 0.3 of 9 MiB free"


def test_a_short_write_on_a_disk_with_room_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_disk(monkeypatch, 700 * MIB, 900 * MIB)
    short = OSError("8000 requested and 512 written")
    assert write_fault(tmp_path, short) == "a write ended early: the disk has 700.0 of 900 MiB free"


def test_the_error_that_another_follows_from_decides(tmp_path: Path) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = full(errno.EDQUOT)
    assert write_fault(tmp_path, error).startswith("Disk quota exceeded: the disk has ")


def test_a_disk_may_lack_files_rather_than_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_disk(monkeypatch, 5 * GIB, 9 * GIB, files=0)
    assert write_fault(tmp_path, full()).endswith("the disk has room for no more files: all 1000 are there")


def test_other_reasons_are_the_systems_own(tmp_path: Path) -> None:
    assert write_fault(tmp_path, full(errno.EACCES)) == "Permission denied"
    assert write_fault(tmp_path, ValueError("a first line\na second")) == "a first line"
    assert not lacks_room(full(errno.EROFS))
