"""Configurations of earlier runs are read; the same keys in a file of a user's are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_core.config.diagnostics import Severity
from rlinf_core.job.load import load_job

# As `rlinf train` wrote it before `sft` lost its section `algorithm`, with one more key that is gone.
EARLIER = """
recipe: sft
cluster: {num_nodes: 1, component_placement: {actor: 0}}
runner: {max_steps: 3, checkpoint_style: whole}
algorithm: {gamma: 0.99, gae_lambda: 0.95, loss_type: actor_critic}
data: {train_data_paths: [demos]}
"""


# Of `algorithm` the command line knows that other recipes have it.
REFUSED = {"unknown-key", "not-available"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"schema": "rlinf.run/1"}))
    (folder / "config.yaml").write_text(EARLIER)
    return folder


def unknown(file: Path, *overrides: str) -> list[str]:
    job = load_job(file, overrides, environ={})
    return [one.path[0] for one in job.diagnostics if one.code in REFUSED and one.path]  # pyright: ignore[reportReturnType]


def test_earlier_keys_of_a_run_are_left_out_with_one_note(run: Path) -> None:
    job = load_job(run / "config.yaml", environ={})
    notes = [one for one in job.diagnostics if one.code == "no-effect"]
    assert [note.severity for note in notes] == [Severity.NOTE]
    assert "`algorithm`" in notes[0].message
    assert "`runner.checkpoint_style`" in notes[0].message
    assert unknown(run / "config.yaml") == []


def test_the_same_file_elsewhere_has_unknown_keys(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "config.yaml"
    mine.write_text(EARLIER)
    assert sorted(unknown(mine)) == ["algorithm", "runner"]


def test_overrides_of_a_run_are_checked_as_ever(run: Path) -> None:
    assert unknown(run / "config.yaml", "runner.max_stepps=3") == ["runner"]
