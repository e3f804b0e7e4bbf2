"""`make mutants ROOM=FOLDER`: break a room in small ways, one at a time, and list what its unit tests do not notice.

Each mutant is written into a copy of the project, and tested in a process forked from one that has imported what is
heavy. A test that fails on a whole module as well says nothing and is left out. Survivors are to be read by hand: a
hole, an equivalent, or text that no test should pin? With `--tests` the same mutants are put to other tests, as before
and after a rewrite of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from tests.mutants.breaks import Mutant, draw

_PROJECT: Final = Path(__file__).parents[2]
_PACKAGES: Final = ("rlinf_core", "rlinf_cli", "recipes")
_HEAVY: Final = ("numpy", "torch", "pydantic", "ruamel.yaml", "hypothesis", "pytest", "ray", "transformers", "rich")
# Files of tests asked about a mutant, the nearest first.
_MOST_FILES: Final = 8
_MOST_FAILING: Final = 5
_FLAGS: Final = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--timeout=60", "-m", "not nightly")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a run of tests ended.

    Attributes:
        code: pytest's exit code; None where the run had to be ended.
        failed: the first test that failed, if any.
    """

    code: int | None
    failed: str | None


def main(
    rooms: Annotated[list[str], typer.Argument(metavar="ROOM...", help="Folders or modules of the product.")],
    count: Annotated[int, typer.Option("--n", min=1, help="Mutants of each room.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 1,
    tests: Annotated[list[str] | None, typer.Option(help="Tests to ask instead of the nearest.")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="Limit of CPU time of the tests of one mutant.")] = 240,
) -> None:
    """Print what notices each mutant, then a table of the rooms and the survivors."""
    rows = ["| room | seed | mutants | killed |", "|---|---|---|---|"]
    unnoticed: dict[str, list[Mutant]] = {room: [] for room in rooms}
    with _copy() as copy:
        imports = _imports(copy)
        _prepare(copy)
        for room in rooms:
            mutants = draw(_PROJECT, room.rstrip("/"), count, seed)
            for mutant in mutants:
                files = tests or _nearest(copy, mutant.module, imports)
                started = time.monotonic()
                verdict = _verdict(copy, mutant, files, seconds)
                print(f"{verdict}, {time.monotonic() - started:.0f} s: {mutant}", flush=True)
                if not verdict.startswith("killed"):
                    unnoticed[room].append(mutant)
            rows.append(f"| {room} | {seed} | {len(mutants)} | {len(mutants) - len(unnoticed[room])} |")
    print("", *rows, sep="\n")
    for room, survivors in unnoticed.items():
        print(f"\n{room}: {len(survivors)} to be read by hand", *survivors, sep="\n  ")


def _verdict(copy: Path, mutant: Mutant, files: list[str], seconds: int) -> str:
    """Return what the tests say of a mutant: `killed by TEST`, `survived`, `too long` or `no tests`."""
    if not files:
        return "no tests"
    left_out: list[str] = []
    while True:
        answer = _run(copy, [*files, *(f"--deselect={test}" for test in left_out)], seconds, mutant)
        if answer.failed is None or len(left_out) == _MOST_FAILING or not _fails_anyway(copy, answer.failed, seconds):
            break
        left_out.append(answer.failed)
    known = {0: "survived", 5: "no tests", None: "too long"}
    return known.get(answer.code) or f"killed by {answer.failed or 'an error of the import'}"


def _fails_anyway(copy: Path, test: str, seconds: int) -> bool:
    # 2: its module cannot be imported. Other codes are of a test that is not found on its own.
    return _run(copy, [test], seconds).code in (1, 2, None)


def _run(copy: Path, tests: list[str], seconds: int, mutant: Mutant | None = None) -> Answer:
    """Run tests in a process of their own, of the copy with `mutant` in it."""
    path = copy / mutant.module if mutant else None
    whole = path.read_text(encoding="utf-8") if path else ""
    with tempfile.TemporaryFile("w+") as output:
        try:
            if path and mutant:
                _write(path, mutant.source)
            code = _fork(tests, seconds, output.fileno())
        finally:
            if path:
                _write(path, whole)
        output.seek(0)
        # The name of a test may hold spaces; what it failed with follows it.
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output.read(), re.M)
    return Answer(code, failed[1] if failed else None)


def _fork(tests: list[str], seconds: int, output: int) -> int | None:
    child = os.fork()
    if child:
        return _wait(child, 6 * seconds)
    code = 3
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        import pytest

        code = int(pytest.main([*_FLAGS, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(child: int, seconds: int) -> int | None:
    """Wait for a child; then end its process group. Return its exit code, None where it was too slow."""
    until = time.monotonic() + seconds
    status = None
    while status is None and time.monotonic() < until:
        ended, value = os.waitpid(child, os.WNOHANG)
        status = value if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return None if code in (-signal.SIGKILL, -signal.SIGXCPU) else code


def _write(path: Path, text: str) -> None:
    """Write a module, and remove its bytecode: two texts of one length, written within a second, look the same."""
    path.write_text(text, encoding="utf-8")
    for old in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        old.unlink()


def _nearest(copy: Path, module: str, imports: dict[str, set[str]]) -> list[str]:
    """Return tests that import a module, then those of its mirrored folder and the contracts right above it."""
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    direct = [test for test, names in imports.items() if any(f"{one}.".startswith(f"{name}.") for one in names)]
    direct.sort(key=lambda test: (name.rpartition(".")[2] not in test, test))
    folder = _mirror(copy, Path(module))
    around = [*sorted(folder.rglob("test_*.py")), *sorted(folder.parent.glob("test_*.py"))] if folder else []
    return list(dict.fromkeys([*direct, *(str(path.relative_to(copy)) for path in around)]))[:_MOST_FILES]


def _mirror(copy: Path, module: Path) -> Path | None:
    package, *rooms = module.parts[:-1]
    if package == "rlinf_core" and not rooms:
        return copy / "tests/unit/core"
    top = copy / "tests/unit" / {"rlinf_core": "", "rlinf_cli": "cli", "recipes": "recipes"}[package]
    folder = top
    for room in rooms:
        if (folder / room).is_dir():
            folder /= room
    return folder if folder != top else None


def _imports(copy: Path) -> dict[str, set[str]]:
    """Return the names of the product that each file of unit tests imports, as `module.name`."""
    names: dict[str, set[str]] = {}
    for path in sorted((copy / "tests/unit").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        pairs = re.findall(r"^\s*from ([\w.]+) import (?:\(([^)]*)\)|(.*))$", text, re.M)
        imported = {
            f"{base}.{name.split(' as ')[0].strip()}" for base, many, one in pairs for name in (many or one).split(",")
        }
        names[str(path.relative_to(copy))] = {name for name in imported if name.startswith(_PACKAGES)}
    return names


def _prepare(copy: Path) -> None:
    """Import what is heavy, and let forked processes find the product and its tests in the copy alone."""
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != _PROJECT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", *_PACKAGES)]:
        del sys.modules[name]


@contextlib.contextmanager
def _copy() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield Path(shutil.copytree(_PROJECT, Path(folder) / "project", ignore=_made, symlinks=True))


def _made(folder: str, names: list[str]) -> set[str]:
    """Return what of a folder no copy needs; `runs` and `site` are also names of packages, below the project."""
    made = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".hypothesis", ".*_cache", "frozen")(folder, names)
    return made | ({"site", "runs"} if Path(folder) == _PROJECT else set())


if __name__ == "__main__":
    typer.run(main)
