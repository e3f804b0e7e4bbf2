"""Forecasts of memory that are kept with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.memory.memory_forecast import NAME, keep_forecast, make_forecast, read_forecast
from rlinf_core.errors import RunError
from tests.unit.cli.report_runs import empty_run


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    assert read_forecast(tmp_path) == {}
    phases: list[dict[str, Any]] = [{"phase": "init_worker", "total": 7}, {"phase": "generate", "total": 9}]
    keep_forecast(tmp_path, {"components": {"rollout": {"phases": phases}}})
    assert read_forecast(tmp_path) == {("rollout", "init_worker"): 7, ("rollout", "generate"): 9}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"components": {"actor": {}}}', '{"components": {"actor": 1}}'])
def test_a_forecast_that_cannot_be_read_names_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(RunError, match="cannot be read") as info:
        read_forecast(tmp_path)
    assert info.value.where == str(tmp_path / NAME)


def test_a_run_without_a_forecast_says_why(tmp_path: Path) -> None:
    run = empty_run(str(tmp_path))
    run.write_config_text("cluster: {num_nodes: 1}\n")
    assert make_forecast(run.path) == "a file without a recipe has no memory forecast"
