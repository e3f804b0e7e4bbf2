"""Relative paths of data and models: the working folder of the command, absolute in what workers and records get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import config_text_of


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in another folder than the one that the command runs in."""
    (tmp_path / "files").mkdir()
    (tmp_path / "here/models/small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "files" / "job.yaml"
    file.write_text(
        "extends: math_laptop.yaml\n"
        "data: {type: math, train_data_paths: train.jsonl, val_data_paths: [a/../val.jsonl, /data/val.jsonl]}\n"
        "actor: {model: {model_path: models/small}}\n"
    )
    return file


def test_path_in_a_file_or_override_means_the_working_folder(job_file: Path) -> None:
    here = os.getcwd()
    for overrides in ([], ["data.train_data_paths=train.jsonl", "actor.model.model_path=models/small"]):
        config: Any = cast("Any", load_job(str(job_file), overrides).config)
        assert config.data.train_data_paths == (f"{here}/train.jsonl",)
        assert config.data.val_data_paths == (f"{here}/val.jsonl", "/data/val.jsonl")
        assert config.actor.model.model_path == f"{here}/models/small"


def test_the_kept_configuration_means_the_same_elsewhere(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(str(job_file))
    kept = job_file.with_name("config.yaml")
    kept.write_text(config_text_of(job))
    monkeypatch.chdir("/")
    again = load_job(str(kept))
    assert again.config == job.config
    assert "train.jsonl" in kept.read_text()


def test_folders_of_the_run_stay_as_they_are_written(job_file: Path) -> None:
    config: Any = cast("Any", load_job(str(job_file), ["runner.resume_dir=auto", "runner.logger.log_path=r"]).config)
    assert (config.runner.resume_dir, config.runner.logger.log_path) == ("auto", "r")
