"""The record of a run that a program starts by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.job.load import load_job
from rlinf_core.runners.standalone import StandaloneRecord


def config_of(tmp_path: Path, *overrides: str, name: str = "laptop", environ: dict[str, str] | None = None) -> Any:
    log_path = f"runner.logger.log_path={tmp_path / 'runs'}"
    return load_job(name, (log_path, *overrides), environ=environ or {}).config


@pytest.mark.parametrize("name", ["laptop", "hetero18", "collocated"])
def test_the_configuration_it_keeps_loads_to_the_same_one(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, "recipe=embodied", name=name)
    with StandaloneRecord.create(config) as record:
        kept = load_job(str(record.folder.config_file), environ={}).config
    assert kept is not None
    assert kept.model_dump() == config.model_dump()


def test_it_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2hunter2")
    config = config_of(tmp_path, "runner.logger.project_name=hunter2hunter2")
    with StandaloneRecord.create(config) as record:
        text = record.folder.config_file.read_text()
    assert "hunter2" not in text
    assert "recipe: embodied" in text


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, "finished", ""),
        (ValueError("camera unplugged"), "failed", "ValueError: camera unplugged"),
        (KeyboardInterrupt(), "interrupted", "interrupted"),
    ],
)
def test_its_folder_says_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, status: str, reason: str
) -> None:
    record = StandaloneRecord.create(config_of(tmp_path))
    record.step_finished(1, {"env/return": 1.0})
    record.close(error)
    record.close(RuntimeError("the first end counts"))
    state = json.loads((record.folder.path / "run.json").read_text())
    assert (state["status"], state["reason"], state["step"]) == (status, reason, 1)
