"""Pages whose examples are typed from top to bottom by a newcomer who does not skip a line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
_BLOCK = re.compile(
    r"^```((?:python|yaml) file=(?P<file>\S+)|python|output)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)


def files_of(page: str) -> dict[str, str]:
    """Return the files of a page by their names."""
    return {block["file"]: block["text"] for block in _BLOCK.finditer(page) if block["file"]}


FollowPage = Callable[..., str]


@pytest.fixture
def follow_page(tmp_path: Path) -> FollowPage:
    """Saves the files of a page in `tmp_path`, runs its Python in one session, and compares what that prints.

    `then` is Python to run after it. What is printed beyond what the page shows is returned.
    """

    def follow(page: str, then: str = "", seconds: float = 150) -> str:
        script: list[str] = []
        expected: list[str] = []
        for block in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
            if block["file"]:
                path = tmp_path / block["file"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block["text"], encoding="utf-8")
            elif block[1] == "output":
                expected.append(block["text"])
            else:
                script.append(block["text"])
        assert script
        (tmp_path / "session.py").write_text("\n".join((*script, then)), encoding="utf-8")
        words = [sys.executable, "session.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0, done.stderr
        printed = "".join(expected)
        assert done.stdout[: len(printed)] == printed
        return done.stdout.removeprefix(printed)

    return follow
