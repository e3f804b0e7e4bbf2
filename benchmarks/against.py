"""`--against COMMIT` of a benchmark: the tree of that commit and this one in turns, in one run on one machine.

The script of each tree measures its own product, with the packages of this environment. What is compared is the first
figure of each line that both print; goals are not. Without arguments of its own the script runs few rounds.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
TURNS: Final = 3
_FIGURE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(/s|x|us|ms|s|MB|%|)(?![\w.])")


class Figure(NamedTuple):
    """A number of a benchmark's table, with its unit."""

    value: float
    unit: str


def main(measure: Callable[[], int], script: str, small: Sequence[str]) -> int:
    """Run `measure`, or with `--against COMMIT [--turns N]` both trees in turns; return the exit status.

    Args:
        measure: the benchmark.
        script: its file.
        small: its arguments where none are given beside `--against`.
    """
    if "--against" not in sys.argv:
        return measure()
    arguments = sys.argv[1:]
    commit = _taken(arguments, "--against")
    turns = int(_taken(arguments, "--turns") or TURNS)
    with _tree(commit) as old:
        figures = _in_turns(Path(script).resolve().relative_to(ROOT), arguments or list(small), old, turns)
    print(f"{turns} turns against {commit}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':60} {'before':>12} {'now':>12} {'now/before':>10}  spread")
    for name, (before, now) in figures.items():
        print(_row(name, before, now), flush=True)
    return 0


def figures_of(output: str) -> dict[str, Figure]:
    """Return the first figure of each line of a benchmark's tables, by what the line calls it."""
    figures: dict[str, Figure] = {}
    for line in output.splitlines():
        name, *fields = (field.strip() for field in re.split(r"\s*\|\s*|\s{2,}", line.strip().strip("|").strip()))
        matches = (_FIGURE.match(field) for field in fields)
        if name and (match := next(filter(None, matches), None)):
            figures.setdefault(name, Figure(float(match[1]), match[2]))
    return figures


def _taken(arguments: list[str], option: str) -> str:
    """Remove an option from the arguments and return its value, empty without the option."""
    if option not in arguments:
        return ""
    at = arguments.index(option)
    _, value = (*arguments[at : at + 2], "")[:2]
    del arguments[at : at + 2]
    if not value:
        sys.exit(f"{option} needs a value")
    return value


@contextlib.contextmanager
def _tree(commit: str) -> Generator[Path]:
    """Check a commit out beside this tree, for a while."""
    with tempfile.TemporaryDirectory(prefix="rlinf-against-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def _in_turns(
    script: Path, arguments: Sequence[str], old: Path, turns: int
) -> dict[str, tuple[list[Figure], list[Figure]]]:
    figures: dict[str, tuple[list[Figure], list[Figure]]] = {}
    for turn in range(turns):
        # Neither tree is always the first, which finds the machine as what ran before has left it.
        trees = (old, ROOT) if turn % 2 == 0 else (ROOT, old)
        rows = {tree: figures_of(_output(tree, script, arguments)) for tree in trees}
        for name in [name for name in rows[old] if name in rows[ROOT]]:
            before, now = figures.setdefault(name, ([], []))
            before.append(rows[old][name])
            now.append(rows[ROOT][name])
    return figures


def _output(tree: Path, script: Path, arguments: Sequence[str]) -> str:
    """Run the script of a tree, and return what it prints.

    Raises:
        SystemExit: it failed. A missed goal is no failure.
    """
    command = [sys.executable, str(tree / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if not figures_of(ended.stdout):
        sys.exit(f"{tree / script} ended with {ended.returncode} and no figures:\n{ended.stderr[-4000:]}")
    return ended.stdout


def _row(name: str, before: Sequence[Figure], now: Sequence[Figure]) -> str:
    ratios = sorted(new.value / old.value for old, new in zip(before, now, strict=True) if old.value)
    middle = [f"{statistics.median(one.value for one in figures):g} {figures[0].unit}" for figures in (before, now)]
    if not ratios:
        return f"{name:60} {middle[0]:>12} {middle[1]:>12}"
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return f"{name:60} {middle[0]:>12} {middle[1]:>12} {statistics.median(ratios):9.2f}x  {spread}"
