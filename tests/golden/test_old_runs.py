"""Runs of an earlier commit, `data/`, are read and judged as by that commit."""

from __future__ import annotations

import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from tests.golden.command_line import rlinf
from tests.golden.frozen import DATA, check_frozen, leaves

# Of answers in JSON: sentences, and how long something took.
_UNFROZEN: Final = re.compile(r"(^|\.)(basis|label|reason|times|created|ended|bytes|seconds)(\.|$)")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of copies of the runs, which is the working folder."""
    shutil.copytree(DATA, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def _is_kept(path: str) -> bool:
    return not _UNFROZEN.search(path)


@pytest.mark.parametrize("words", ["why first", "compare first longer", "runs", "export first --out exported"])
def test_commands_answer_as_before(words: str, runs: Path) -> None:
    if words.startswith("export"):
        assert rlinf("runs", "convert", "first", "--runs-dir", "runs")[0] == 0
    code, answer = rlinf(*words.split(), "--runs-dir", "runs", "--json")
    facts = [f"{path} = {text}" for path, text in leaves(answer) if _is_kept(path)]
    if (model := Path("exported/model.safetensors")).exists():
        from safetensors.torch import load_file

        digests = {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in load_file(model).items()}
        facts += [f"{name} {digest[:16]}" for name, digest in sorted(digests.items())]
    check_frozen(f"old_runs/{words.split()[0]}", [f"exit {code}", *facts])


def test_a_report_is_written_of_it(runs: Path) -> None:
    assert rlinf("report", "first", "longer", "-o", "report.html", "--runs-dir", "runs")[0] == 0
    assert "longer" in Path("report.html").read_text()
