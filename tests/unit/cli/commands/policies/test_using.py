"""The jobs of commands that use a policy, `rlinf_cli.run.policies`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.job.job_file import without_start, without_training_data
from rlinf_cli.run.policies import find_run_folder
from rlinf_core.errors import RunError
from rlinf_core.job.load import load_job


@pytest.mark.parametrize("overrides", [("data.train_data_paths=to/be/made",), ("data.train_data_paths=[]",)])
def test_a_recording_needs_no_file_that_only_training_reads(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    job = load_job("sft_laptop", (f"runner.logger.log_path={tmp_path}", *overrides))
    assert not job.ok
    assert without_training_data(job).ok


@pytest.mark.parametrize(
    "override",
    ["data.normalization=all", "data.train_data_paths={path: a, episodes: [-1]}", "runner.resume_dir=not/there"],
)
def test_it_needs_everything_else_of_the_file(override: str) -> None:
    job = load_job("sft_laptop", ("data.train_data_paths=to/be/made", override))
    assert not without_training_data(job).ok


def test_a_policy_is_used_with_what_training_refuses() -> None:
    job = load_job("math_laptop", ("rollout.sampling_params.temperature=0",))
    assert not job.ok
    assert without_training_data(job).ok


def test_a_run_needs_no_checkpoint_that_it_was_resumed_from() -> None:
    job = without_training_data(load_job("sft_laptop", ("data.train_data_paths=to/be/made", "runner.resume_dir=gone")))
    assert not job.ok
    assert without_start(job).ok


def test_a_folder_of_runs_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="this folder is not a run") as caught:
        find_run_folder("empty")
    assert caught.value.help == "name a run folder or a job file"
    (tmp_path / "laptop").mkdir()
    assert find_run_folder("laptop") is None
