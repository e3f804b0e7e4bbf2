"""The quickstart's run of a language model, and the parts of one in Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.docs.conftest import DOCS, files_of


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_parts_of_language_models_print_what_the_page_says(follow_page: Callable[..., str]) -> None:
    assert follow_page("language-models.md") == "", "all that it prints is on the page"


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_its_commands_train_a_model_that_transformers_loads(tmp_path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    (tmp_path / "ask.py").write_text(files_of(page)["ask.py"], encoding="utf-8")
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    (commands,) = re.findall(r"^```sh\n((?:(?!```).*\n)*python ask\.py.*\n)```", page, re.MULTILINE)
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^prompt \d+, answer \d+: reward ", done.stdout, re.MULTILINE)) == 3
    assert re.search(r"^3\s*\+\s*4\s*=\s*\d", done.stdout, re.MULTILINE)
