"""docs/tutorial.md, typed from top to bottom by a newcomer who does not skip a line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python file=(?P<file>\S+)|python|output)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    script: list[str] = []
    expected: list[str] = []
    for block in BLOCK.finditer(TUTORIAL.read_text(encoding="utf-8")):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"], encoding="utf-8")
        elif block[1] == "output":
            expected.append(block["text"])
        else:
            script.append(block["text"])
    (tmp_path / "session.py").write_text("\n".join(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "session.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(expected)
