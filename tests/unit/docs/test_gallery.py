"""docs/results.md: its commands start, and the reports that have been made are linked."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import gallery
from rlinf_cli.main import main

ENTRIES = gallery.entries()


def test_there_are_four_runs() -> None:
    assert [entry.name for entry in ENTRIES] == ["trained", "failed", "videos", "samples"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_its_command_is_sound(entry: gallery.Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*entry.arguments, "--dry-run", "--quiet"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_only_reports_that_are_there_are_linked(tmp_path: Path) -> None:
    page = (gallery.DOCS / "results.md").read_text(encoding="utf-8")
    assert gallery.with_links(page, tmp_path) == page
    (tmp_path / "failed.html").write_text("<p>report</p>")
    linked = gallery.with_links(page, tmp_path)
    assert "(gallery/failed.html)" in linked
    assert "(gallery/trained.html)" not in linked


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gallery.main(["nosuch"]) == 2
    assert "there are trained, failed, videos, samples" in capsys.readouterr().out
