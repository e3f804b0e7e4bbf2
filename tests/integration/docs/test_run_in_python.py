"""The page of the run directory: what it shows of a run in Python is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage import run_folder
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.docs.conftest import FollowPage


@pytest.mark.timeout(100)
def test_page_prints_what_it_shows(follow_page: FollowPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260314-101502")
    runner = RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path / "runs")}})
    run = RunFolder.create(runner, "embodied")
    run.write_config_text("recipe: embodied\nactor: {optim: {lr: 3.0e-4}}\n")
    with MetricsWriter(run.metrics_file) as writer:
        writer.log(150, {"env/return": 4.9, "eval/return": 5.04, "eval/success_once": 1.0})
    run.update(step=150)
    run.end("finished")
    assert follow_page("run-folder.md") == ""
