"""Whether walks keep to their folder, and trees are removed, whatever is in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipes.agent.boxes import layer_files, trees


def folders(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
    return folder


def test_a_walk_goes_into_what_it_is_told_to(tmp_path: Path) -> None:
    folders(tmp_path, "a/deep", "b")
    (tmp_path / "a/file").write_text("1")
    (tmp_path / "link").symlink_to("a")
    seen: list[tuple[str, bool]] = []
    with trees.opened(str(tmp_path)) as top:
        walk = trees.Walk(top)
        for entry in walk:
            seen.append((walk.path(entry.name), entry.left))
            if entry.is_folder and not entry.left and entry.name != "b":
                walk.enter()
    left = [("a/deep", False), ("a/deep", True), ("a/file", False), ("a", True)]
    assert seen == [("a", False), *left, ("b", False), ("link", False)]


@pytest.mark.parametrize("moved_to", ["top/elsewhere", "outside/elsewhere"])
def test_a_walk_beneath_which_folders_are_moved_stays_inside(moved_to: str, tmp_path: Path) -> None:
    folders(tmp_path, "top/a/b/c", "top/a/d", "top/e", "outside/secret")
    seen: list[str] = []
    with trees.opened(str(tmp_path / "top")) as top:
        walk = trees.Walk(top)
        for entry in walk:
            if entry.left:
                continue
            seen.append(entry.name)
            walk.enter()
            if entry.name == "c":
                (tmp_path / "top/a/b").rename(tmp_path / moved_to)
    assert seen == ["a", "b", "c", "d", "e"]


def test_a_large_tree_is_removed_and_no_link_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "tree/closed/in", "kept")
    (tmp_path / "kept/file").write_text("1")
    (tmp_path / "tree/closed/link").symlink_to(tmp_path / "kept")
    for number in range(17_000):
        (tmp_path / f"tree/closed/in/{number}").touch()
    (tmp_path / "tree/closed/in").chmod(0)
    trees.remove_tree(str(tmp_path / "tree"))
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_what_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "tree/a", "tree/b")
    for name in ("a/file", "a/held", "b/file"):
        (tmp_path / "tree" / name).touch()
    unlink = os.unlink

    def held(name: str, **settings: int) -> None:
        if name == "held":
            raise PermissionError
        unlink(name, **settings)

    monkeypatch.setattr(os, "unlink", held)
    trees.remove_tree(str(tmp_path / "tree"))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["tree", "tree/a", "tree/a/held"]


def test_a_file_with_all_the_names_it_may_have_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "upper/app")
    (tmp_path / "upper/app/file").write_text("1")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", full)
    with trees.opened(str(tmp_path)) as box:
        assert layer_files.keep_only(box, ["/app"], [], 10) == ([], 0, True)
    assert (tmp_path / "kept/app/file").read_text() == "1"


def test_what_a_box_wrote_is_counted_in_pieces(tmp_path: Path) -> None:
    folders(tmp_path, "a", "b")
    for number in range(350):
        (tmp_path / "ab"[number % 2] / str(number)).write_text("1")
    with trees.opened(str(tmp_path)) as top:
        counted = list(layer_files.disk_use(top, 1 << 40, 1000))
        assert [files for _, files in counted] == [100, 200, 300, 352]
        assert counted[-1][0] >= 350
        assert [files for _, files in layer_files.disk_use(top, 1 << 40, 150)][-1] == 151
