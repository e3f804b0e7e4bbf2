"""Files that anybody may have left: pipes, devices, links, gigabytes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlinf_core.foreign.files import BadFileError, open_below, open_log, open_regular, read_bounded, read_json_object


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
