"""Projects of `rlinf init`: their own tests pass, and their jobs train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_cli.projects.project_files import ProjectKind
from rlinf_core import load_run
from rlinf_core.runners.storage.run_folder import RunFolder

# A nightly test trains five jobs one after the other.
pytestmark = pytest.mark.timeout(900)


def work(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expect_two_steps(folder: Path, job: Path) -> None:
    work(folder, "rlinf_cli", "train", str(job), "runner.max_steps=2", f"runner.logger.log_path={job.stem}-runs")
    newest = RunFolder.latest(folder / f"{job.stem}-runs")
    assert newest is not None
    run = load_run(newest.path)
    assert (run.status, run.step) == ("finished", 2)
    assert [record["step"] for record in run.metrics][-2:] == [1, 2]


def test_recipe_of_one_s_own_trains_two_steps(tmp_path: Path) -> None:
    work(tmp_path, "rlinf_cli", "init", "recipe", "--name", "bandits")
    expect_two_steps(tmp_path, Path("bandits.yaml"))


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "options"), [*((kind, ()) for kind in ProjectKind), ("env", ("--gymnasium",))])
def test_project_passes_its_tests_and_trains(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    work(tmp_path, "rlinf_cli", "init", kind, *options, "--name", "project")
    work(tmp_path, "pytest", "-q", "-p", "no:cacheprovider")
    jobs = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml"))
    assert len(jobs) == (5 if kind == ProjectKind.LAB else 1)
    for job in jobs:
        expect_two_steps(tmp_path, job)
