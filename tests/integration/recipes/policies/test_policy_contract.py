"""Published policies against their originals, in an interpreter with lerobot; without one this is skipped.

RLINF_TEST_LEROBOT=V/bin/python pytest -m nightly tests/integration/recipes/policies/test_policy_contract.py
(see test_lerobot_policies.py for V). What comes out is the table in docs/dev/policies.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("RLINF_TEST_LEROBOT", "")
ROOT = Path(__file__).parents[4]
PROGRAMS = Path(__file__).with_name("policy_contract")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
COLUMNS = ("names", "picture", "chunk", "loss", "reload", "repeat")
# What needs lerobot here, too; the others run with the transformers that this program asks for.
NEED_LEROBOT = (
    *("act", "diffusion", "vqbet", "multi_task_dit", "xvla", "smolvla"),
    *("diffusion_2_obs", "vqbet_5_obs", "multi_task_dit_2_obs"),
)


def rows_of_docs() -> dict[str, list[str]]:
    """Return the verdicts in the docs, by policy."""
    text = (ROOT / "docs" / "dev" / "policies.md").read_text()
    table = text.partition("## Held against the originals")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def run(python: str, program: str, *arguments: str) -> str:
    command = [python, str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_docs_have_a_row_for_each_policy_held() -> None:
    text = (PROGRAMS / "record.py").read_text()
    recorded = [line.split('"')[1] for line in text.splitlines() if line.startswith('    "')]
    assert list(rows_of_docs()) == recorded


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", list(rows_of_docs()))
def test_a_policy_equals_its_original(policy: str, tmp_path: Path) -> None:
    run(PYTHON, "record.py", str(tmp_path), policy)
    printed = run(PYTHON if policy in NEED_LEROBOT else sys.executable, "contract.py", str(tmp_path), policy)
    verdicts = json.loads(printed.splitlines()[-1])[policy]
    assert [verdicts[column] for column in COLUMNS] == rows_of_docs()[policy]
