"""Files of others: their size, their models, and writing that fails."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.errors import RemoteError
from rlinf_core.foreign.budget import Budget, OverBudgetError, in_words, json_size
from rlinf_core.foreign.files import (
    BadFileError,
    lacks_room,
    open_below,
    open_log,
    open_regular,
    read_bounded,
    read_json_object,
    read_model,
    write_fault,
)
from rlinf_core.runners.storage.checkpoint import ManifestFile


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("here")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(BadFileError, match=f"is a {kind}, not a regular file"):
        open_regular(path)
    with pytest.raises(BadFileError, match="is a link" if kind == "device" else f"is a {kind}"):
        open_log(tmp_path, "here")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 1000)
    assert len(read_bounded(path, 1000)) == 1000
    with pytest.raises(BadFileError, match="is larger than 999 bytes"):
        read_bounded(path, 999)
    os.truncate(path, 1 << 32)
    with pytest.raises(BadFileError, match="is larger than 64 MiB"):
        read_bounded(path)


@pytest.mark.parametrize("text", ["[" * 200_000, "{", '{"a": NaN}', "[]", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', ""])
def test_json_that_nothing_can_use_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadFileError):
        read_json_object(tmp_path / "file")


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    for _ in range(2):
        os.close(open_log(tmp_path, "logs/actor/rank_0.log"))
    assert (tmp_path / "logs" / "actor" / "rank_0.log").is_file()


@pytest.mark.parametrize("linked", ["logs", "logs/actor", "logs/actor/rank_0.log"])
def test_no_link_is_followed_on_writing(linked: str, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    is_file = linked.endswith(".log")
    precious.mkdir()
    (run / linked).parent.mkdir(parents=True)
    (precious / "file").write_text("mine")
    (run / linked).symlink_to(precious / "file" if is_file else precious)
    with pytest.raises(BadFileError, match="is a link, which is not followed") as raised:
        open_below(run, "logs/actor/rank_0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert raised.value.filename == str(run / linked)
    assert [path.name for path in precious.rglob("*")] == ["file"]
    assert (precious / "file").read_text() == "mine"


def test_a_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    os.close(open_log(tmp_path / "runs", "a/b"))
    assert (tmp_path / "disk" / "a" / "b").is_file()


def test_claims_are_added_up() -> None:
    budget = Budget(100, "a body")
    budget.take(60)
    budget.take(40)
    with pytest.raises(OverBudgetError, match=r"^claims 101 bytes up to row 3; a body may take 100 bytes$"):
        budget.take(1, "row 3")


def test_file_may_claim_a_multiple_of_its_size(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(4 << 20))
    assert Budget.of_files(small).left == 128 << 20
    assert Budget.of_files(large).left == 512 << 20
    assert Budget.of_files(small, large).left == 128 * (1000 + (4 << 20))


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62, 2**62, 2**62), (10**9, 1)])
def test_shape_that_overflows_is_a_claim(shape: tuple[int, ...]) -> None:
    with pytest.raises(OverBudgetError, match=r"^claims .* TiB up to `a`|^claims 3.7 GiB up to `a`"):
        Budget(1 << 20, "a file").take_array(shape, 4, "`a`")


def test_empty_arrays_claim_nothing() -> None:
    budget = Budget(0, "a file")
    budget.take_array((2**40, 0), 4)
    assert budget.left == 0


@pytest.mark.parametrize("value", [[{}] * 50, list(range(50)), {str(key): [] for key in range(50)}, ["a" * 100] * 50])
def test_size_of_json_covers_its_values(value: object) -> None:
    text = json.dumps(value)
    assert json_size(text) == json_size(text.encode())
    assert json_size(text) >= len(text) + 50 * 64


def test_bytes_in_words() -> None:
    assert [in_words(size) for size in (3, 5120, 1 << 20, 3 << 29, 1 << 40)] == [
        "3 bytes",
        "5 KiB",
        "1 MiB",
        "1.5 GiB",
        "1 TiB",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"facts": {"a": [1]}}, "`facts.a` is `[1]`, but it should be a text, a number, true, false or null"),
        ({"facts": [1]}, "`facts` is `[1]`, but it should be a mapping"),
        ({"metrics": {"loss": "x"}}, '`metrics.loss` is `"x"`, but it should be a number'),
        ({"files": {"../a": 1}}, '`files` has the key `"../a"`, but a file of a checkpoint is named relative to its'),
        ({"digests": {"a": None}}, "`digests.a` is `null`, but it should be a text"),
        ({"step": True}, "`step` is `true`, but it should be a whole number"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"schema": "rlinf.checkpoint/1", "step": 1, **fields}))

    with pytest.raises(OSError, match="invalid value") as caught:
        read_model(file, ManifestFile)

    assert message in str(caught.value.strerror)


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
