"""`--against COMMIT` of a benchmark runs the script of both trees in turns, and compares what both print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import against


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose first commit took 2 ms, and whose tree takes 3."""
    monkeypatch.setattr(against, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "product.py").write_text("MILLISECONDS = 2")
    (tmp_path / "bench.py").write_text(
        "import product, sys\nprint('call of', *sys.argv[1:], '  ', product.MILLISECONDS, 'ms')"
    )
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    (tmp_path / "product.py").write_text("MILLISECONDS = 3")
    return tmp_path


def _main(project: Path, *arguments: str) -> int:
    sys.argv[1:] = arguments
    return against.main(lambda: 7, str(project / "bench.py"), ("little",))


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py"])


def test_each_tree_measures_its_own_product(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(project, "--against", "HEAD", "--turns", "2") == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == ["call", "of", "little", "2", "ms", "3", "ms", "1.50x", "1.50", "to", "1.50"]
    trees = subprocess.run(["git", "-C", project, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(trees.stdout.splitlines()) == 1


def test_own_arguments_go_to_both(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(project, "much", "--against", "HEAD", "--turns", "1") == 0
    assert "call of much" in capsys.readouterr().out


def test_a_script_without_figures_ends_the_comparison(project: Path) -> None:
    (project / "bench.py").write_text("raise SystemExit('broken')")
    with pytest.raises(SystemExit, match="broken"):
        _main(project, "--against", "HEAD")


def test_a_commit_is_needed(project: Path) -> None:
    with pytest.raises(SystemExit, match="--against needs a value"):
        _main(project, "--against")


def test_without_the_option_the_benchmark_itself_runs(project: Path) -> None:
    assert _main(project) == 7


@pytest.mark.parametrize(
    ("line", "name", "figure"),
    [
        ("small          17223/s      668/s ray.util.queue   25.19x", "small", (17223, "/s")),
        ("call on 8 workers    3.78 ms      2.93 ms    1.25x", "call on 8 workers", (3.78, "ms")),
        ("rlinf --help          108 ms   106-112 ms    1.40     1.5", "rlinf --help", (108, "ms")),
        ("| recv of 256 MB / memcpy | 38.1 ms against 20.7 ms | 0.54x |", "recv of 256 MB / memcpy", (38.1, "ms")),
        ("now: seconds      4.1    <= 6 s ok     6.3 cpu-s: driver 1.1", "now: seconds", (4.1, "")),
    ],
)
def test_the_first_figure_of_a_line_counts(line: str, name: str, figure: tuple[float, str]) -> None:
    assert against.figures_of(line) == {name: figure}


@pytest.mark.parametrize(
    "line", ["12 rounds, 2 cores, load 2.0", "          median    quartiles   ratio", "| --- | --- |", ""]
)
def test_heads_of_tables_have_no_figure(line: str) -> None:
    assert against.figures_of(line) == {}
