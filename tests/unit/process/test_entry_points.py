"""Entry points of installed packages, found without `importlib.metadata`."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from rlinf_core.process.entry_points import EntryPoint, offered

POINTS = """\
[console_scripts]
rlinf.commands = never:main

[rlinf.commands]
# = a comment
greet = its_module:app
 far = its_module : deep.app [extra]
"""


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "entry_points.txt").write_text(text, encoding="utf-8")


def test_points_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "its_package-1.0.dist-info", POINTS)
    install(tmp_path, "its_older.egg-info", "[rlinf.commands]\ngreet = later:app\nold = its_older:app\n")
    install(tmp_path, "no_package", "[rlinf.commands]\nnever = no_package:app\n")
    (tmp_path / "bare-1.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path / "gone"), str(tmp_path)])
    points = offered("rlinf.commands")
    assert {"greet", "far", "old"} == set(points)
    assert points["old"] == EntryPoint("old", "its_older:app")
    assert points["far"].module == "its_module"


def test_package_that_is_installed_twice_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "first", "Its_Package-2.dist-info", "[rlinf.commands]\nnew = its:new\n")
    install(tmp_path / "second", "its.package-1.dist-info", "[rlinf.commands]\nold = its:old\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert offered("rlinf.commands") == {"new": EntryPoint("new", "its:new")}


def test_object_is_loaded_as_it_is_named() -> None:
    assert EntryPoint("a", "os:path.join").load() is os.path.join
    assert EntryPoint("a", "os : path.join [extra]").load() is os.path.join
    assert EntryPoint("a", "os.path").load() is os.path
    with pytest.raises(AttributeError):
        EntryPoint("a", "os:nothing_there").load()


@pytest.mark.parametrize("group", ["rlinf.commands", "rlinf.recipes", "console_scripts", "pytest11"])
def test_installed_packages_offer_what_importlib_metadata_says(group: str) -> None:
    expected: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=group):
        expected.setdefault(point.name, point.value)
    assert {point.name: point.value for point in offered(group).values()} == expected
