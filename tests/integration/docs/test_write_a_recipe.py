"""The page that builds a recipe with a loop of its own: what it shows validates, trains and resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.docs.conftest import DOCS, files_of

pytestmark = pytest.mark.timeout(400)
RLINF = Path(sys.executable).with_name("rlinf")


@pytest.mark.nightly
def test_the_recipe_of_the_page_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "write-a-recipe.md").read_text(encoding="utf-8")
    for name, text in files_of(page).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # What `pip install -e .` leaves of the entry point.
    installed = tmp_path / "my_line-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-line\nVersion: 1\n")
    entry = page.split("```toml\n")[1].split("```")[0]
    points = entry.replace('[project.entry-points."rlinf.recipes"]', "[rlinf.recipes]").replace('"', "")
    (installed / "entry_points.txt").write_text(points)
    monkeypatch.chdir(tmp_path)

    def rlinf(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [RLINF, *arguments], capture_output=True, text=True, timeout=180, check=False, env=environment
        )

    checked = rlinf("validate", "job.yaml", "learner.batch_size=5000")
    assert checked.returncode == 2
    assert "a buffer of 2000 gives no batches of 5000" in checked.stdout + checked.stderr
    trained = rlinf("train", "job.yaml")
    assert trained.returncode == 0, trained.stderr
    run = RunFolder.latest("runs")
    assert run is not None
    lines = read_metrics(run.metrics_file)
    returns = {line.step: line.metrics["eval/return"] for line in lines if "eval/return" in line.metrics}
    assert list(returns) == [0, 6, 12]
    assert returns[0] < 1 == returns[12]
    resumed = rlinf("train", "job.yaml", "runner.resume_dir=auto", "runner.max_steps=14")
    assert resumed.returncode == 0, resumed.stderr
    assert [line.step for line in read_metrics(run.metrics_file)] == list(range(15))
    # The buffer went on from the checkpoint.
    buffers = [line.metrics["train/buffer"] for line in read_metrics(run.metrics_file) if line.step]
    assert buffers == sorted(buffers)
