"""`rlinf why --replay` finds the item in the run's folder, and says why one cannot be done again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.storage.evidence import quarantine
from tests.unit.cli.why.made_runs import made_run

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = made_run(tmp_path).path
    quarantine(path, "episode", "1834-17", 5, ["died"], {"seed": 1})
    quarantine(path, "prompt", "8", 5, ["died"])
    return path


def test_unknown_item_is_refused_with_those_there_are(cli: Run, folder: Path) -> None:
    err = cli.fails(1, "replay", "episode-1834-18", str(folder))
    assert "there is no item `episode-1834-18`" in err
    assert "did you mean `episode-1834-17`?" in err


def test_item_that_needs_its_engine_is_refused(cli: Run, folder: Path) -> None:
    err = cli.fails(1, "replay", "quarantine/prompt-8.json", str(folder))
    assert "a prompt cannot be replayed alone" in err
    assert "look up prompt 8 in the data" in err


def test_run_that_set_nothing_aside_says_so(cli: Run, tmp_path: Path) -> None:
    ended = cli("replay", "x", str(made_run(tmp_path).path))
    assert (ended.code, "the run has no quarantined items" in ended.err) == (1, True)
