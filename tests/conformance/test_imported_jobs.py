"""Jobs of RLinf and verl, imported from their checkouts, are planned and trained with stand-ins for what they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlinf_cli.main import main
from tests.conformance.imports import job_file
from tests.conformance.jobs import KINDS, TRAININGS
from tests.conformance.stand_ins import StandIns, overrides, variables, write_stand_ins
from tests.conformance.test_imports import CHECKOUTS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

_STEPS = 3


@pytest.fixture(scope="module")
def checkouts() -> Path:
    """The folder of checkouts."""
    folder = os.environ.get(CHECKOUTS)
    if not folder:
        pytest.skip(f"needs checkouts of other projects: `make conformance DIR=FOLDER` sets {CHECKOUTS}")
    return Path(folder).expanduser()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    return write_stand_ins(tmp_path_factory.mktemp("stand_ins"))


def imported(source: Path, folder: Path) -> Path:
    """Import a job in this process, and return the new file."""
    if not source.exists():
        pytest.skip(f"the checkout has no `{source.name}`")
    file = folder / "imported.yaml"
    if source.suffix == ".sh":
        checkout = next(above for above in source.parents if above.name == "verl")
        with tempfile.TemporaryDirectory(dir=folder) as recording:
            job = job_file(source, checkout, Path(recording))
            assert job is not None, source.name
            source = job.rename(folder / "job.yaml")
    assert main(["import", str(source), "-o", str(file), "--replace"]) == 0, source.name
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_imported_jobs_are_planned(
    checkouts: Path,
    made: StandIns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    names, accelerators = KINDS[kind]
    rows = made.verl_rows if kind == "verl" else made.rows
    monkeypatch.syspath_prepend(made.packages)
    for name in names:
        file = imported(checkouts / name, tmp_path)
        text = file.read_text()
        for variable, value in variables(text).items():
            monkeypatch.setenv(variable, value)
        capsys.readouterr()
        plan = ["--dry-run", "--assume", str(accelerators), "--json"]
        code = main(["train", str(file), *overrides(text, made, rows=rows), *plan])
        out, err = capsys.readouterr()
        assert code == 0, f"{name}: {err}"
        assert json.loads(out)["placement"]
    assert len(set(names)) == (3 if kind == "agent" else 10)


@pytest.mark.ray
@pytest.mark.parametrize("kind", TRAININGS)
def test_imported_job_is_trained(checkouts: Path, made: StandIns, tmp_path: Path, kind: str) -> None:
    name, changes, metric = TRAININGS[kind]
    file = imported(checkouts / name, tmp_path)
    text = file.read_text()
    stand_ins = overrides(text, made, rows=made.verl_rows if kind == "verl" else made.rows)
    always = (f"runner.max_steps={_STEPS}", "runner.logger.log_path=runs", "runner.logger.logger_backends=[]")
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "train", str(file), *stand_ins, *changes, *always],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(made.packages), **variables(text)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, float]] = [json.loads(line)["metrics"] for line in lines]
    learned = [step[metric] for step in steps if metric in step]
    assert len(learned) == _STEPS
    assert all(value > 0 for value in learned)
