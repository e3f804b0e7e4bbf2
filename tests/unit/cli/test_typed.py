"""What each command answers, typed once right and once wrong: `typed.txt`.

`REWRITE_FROZEN=1 pytest tests/unit/cli/test_typed.py` writes the file anew; its diff is read and committed with the
change that it shows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.frozen import DATA

FROZEN: Final = Path(__file__).with_name("typed.txt")
# Each right call answers at once, and the same on every machine: commands that train, or use a policy, are typed wrong.
TYPED: Final = (
    ("train -q", "train laptop.yml"),
    ("train laptop actor.optim.lr=1e-4,3e-4 --dry-run", "train laptop actor.optim.lr=1e-4,1e-4 --dry-run"),
    ("validate laptop", "validate laptop actor.optim.lr=fast"),
    ("inspect laptop", "inspect laptpo"),
    ("inspect env laptop -c env -r 0 -q", "inspect laptop env -c evn -r 0"),
    ("inspect memory first --available 64 -q", "inspect memory first --available none"),
    ("explain recipe", "explain unknown-kye"),
    ("explain empty-file", "explain --schema --recipe math_"),
    ("init reward mine", "init rewrad mine"),
    ("up laptop --dry-run --name typed", "up laptop --print slrum"),
    ("status --name nothing", "status --nmae x"),
    ("down --name nothing", "down --node-rank 1"),
    ("doctor laptop actor.optim.lr=fast", "doctor"),
    ("ps longer", "ps longr"),
    ("logs first driver -n 2", "logs first actr"),
    ("logs :0 -n 1", "logs :7"),
    ("stop first", "stop frist"),
    ("runs --sort name -q", "runs prnue"),
    ("runs prune longer", "runs prune --older-than 7"),
    ("why longer", "why --replay episode-1 first"),
    ("report longer --text", "report first longer --text"),
    ("report first --samples", "report first -n 3 --smaples"),
    ("compare first longer", "compare first"),
    ("eval first --play -n 40", "eval first algorithm.gamma=0.5"),
    ("export first --checkpoint 3", "export first --format onxn"),
    ("import nothing.yaml", "import laptop.yaml x.yaml"),
    ("serve laptop", "serve serve_laptp"),
    ("record laptop algorithm.gamma=0.5", "record first -n none"),
    ("robot list laptop", "robot list laptop 1"),
    ("venv list --json", "venv setup laptop"),
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and working folder with two runs in `runs`, as its only content."""
    shutil.copytree(DATA, tmp_path / "runs")
    for file in (tmp_path / "runs").glob("*/run.json"):
        # Ages of one digit, in the order of before: the column is as wide as the longest.
        state = file.read_text()
        created = json.loads(state)["created"]
        file.write_text(state.replace(str(created), f"{time.time() - 5 * 3600 + created % 3600:.7f}"))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RLINF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_commands_answer_as_they_did(cli: Callable[..., Any], runs: Path) -> None:
    blocks: list[str] = []
    for line in (line for pair in TYPED for line in pair):
        ended = cli(*line.split())
        assert "Traceback" not in ended.err
        assert "this is a bug" not in ended.err
        text = "".join((f"$ rlinf {line}\n", ended.out, ended.err, f"[exit {int(ended.code)}]\n"))
        text = text.replace(f"{runs}/", "").replace(str(runs), "~").replace(f"{Path(__file__).parents[3]}/", "")
        text = text.replace(f"bin/{Path(sys.executable).name}", "bin/python")
        blocks.append(re.sub(r"\d+(\.\d+)? (s|min|h|d)\b", "N \\2", text))
    answers = "\n".join(blocks)
    if os.environ.get("REWRITE_FROZEN") == "1":
        FROZEN.write_text(answers, encoding="utf-8")
    assert answers == FROZEN.read_text(encoding="utf-8")
