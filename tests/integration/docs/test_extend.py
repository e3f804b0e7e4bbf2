"""The page about recipes of one's own: its blocks are sound, and the example that it names trains and resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlinf_core import Recipe
from rlinf_core.job.load import load_job
from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.docs.conftest import DOCS

pytestmark = pytest.mark.timeout(400)
EXAMPLES = DOCS.parent / "examples"
FILE = EXAMPLES / "own_recipe.py"
RLINF = Path(sys.executable).with_name("rlinf")


def test_recipe_is_one_file_of_sixty_lines() -> None:
    assert len([line for line in FILE.read_text(encoding="utf-8").splitlines() if line.strip()]) <= 60


def test_blocks_of_the_page_are_sound() -> None:
    page = (DOCS / "extend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    # As a module of its own, which pickling of its classes asks for.
    names: dict[str, Any] = {"__name__": "page_of_recipes"}
    for block in blocks:
        exec(block, names)  # noqa: S102 - the page's own
    report = Mock()
    names["check"](None, {"learner": 1}, report)
    report.assert_not_called()
    names["check"](None, {"learner": 2}, report)
    assert report.call_args.args[:2] == (("cluster", "component_placement", "learner"), "one-learner")
    assert {"launch", "program"} <= names.keys()
    assert isinstance(names["recipe"], Recipe)


def test_recipe_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    job = load_job("recipe=own_recipe:recipe", ["moves=x"], environ={})
    assert [(diagnostic.code, diagnostic.path) for diagnostic in job.diagnostics] == [("wrong-type", ("moves",))]
    assert dict(job.world_sizes) == {"walker": 2, "learner": 1}


def test_recipe_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    command = [str(RLINF), "train", "recipe=own_recipe:recipe"]
    for changes in ([], ["runner.resume_dir=auto", "runner.max_steps=14"]):
        done = subprocess.run(
            [*command, *changes], capture_output=True, text=True, timeout=180, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
    run = RunFolder.latest("runs")
    assert run is not None
    lines = read_metrics(run.metrics_file)
    returns = {line.step: line.metrics["eval/return"] for line in lines if "eval/return" in line.metrics}
    # Ten times along the line for each of the two walkers.
    assert returns[0] < returns[12] == returns[14] == 20
    assert [line.step for line in lines] == list(range(15))
    assert {"time/walk", "time/learn", "train/loss"} <= lines[-1].metrics.keys()
    assert (run.path / "curve.png").is_file()
