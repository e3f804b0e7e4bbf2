"""A check of words: `python -m docs.style` lists docstrings, names and test names that a reader stumbles over.

The first line of a docstring is a sentence in the imperative mood for a function, and a noun phrase for a class, a
module or a property: "Return the rank", "The rank of a process". ruff (D401) checks the mood, this module the
first word. An entry of `Args` or `Attributes` says what the value is: "seed: the seed of the split", not "of the
split". A local name says what its value is, and a test's name fits into a line of a report.

The subjects of the newest commits fit into a line of `git log`. `python -m docs.style --message FILE` checks that of a
commit message instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Final, NamedTuple, TypeAlias

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("rlinf_core", "rlinf_cli", "recipes", "benchmarks", "docs", "examples")
# Words that fit every value, and so name none.
EMPTY_NAMES: Final = frozenset({"each", "found", "given", "more", "some", "tell", "told"})
LONGEST_TEST_NAME: Final = 60
LONGEST_SUBJECT: Final = 72
# Not everybody installs the hook that checks a message, so that the newest commits are checked again.
NEWEST_COMMITS: Final = 30

_RELATIVE: Final = frozenset({"How", "That", "What", "Where", "Which", "Who", "Whom", "Whose"})
# With one of these an entry of `Args` or `Attributes` is the rest of a sentence that nobody has begun.
_REST: Final = frozenset(
    "after among as at before behind between by for from in of per that to whose with within without".split()  # noqa: SIM905
)
_Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A place where the style is not met."""

    file: Path
    line: int
    text: str


def product_faults(file: Path) -> Iterator[Fault]:
    """Yield the docstrings and names of a module of the product that say nothing."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, _Documented):
            first, _, _ = (ast.get_docstring(node) or "").partition("\n")
            word = re.match(r"\w*", first)
            if word and (word[0] in _RELATIVE or (word[0] == "Whether" and not _is_property(node))):
                yield Fault(file, node.body[0].lineno, f"a docstring opens with a relative clause: {first}")
            for entry, opening in _entries(node):
                if opening in _REST:
                    yield Fault(file, node.body[0].lineno, f"`{entry}: {opening} ...` does not say what the value is")
    yield from _empty_names(file, tree)


def _empty_names(file: Path, tree: ast.Module) -> Iterator[Fault]:
    """Yield the names that say nothing."""
    # A field is read with its class beside it: `mismatch.found` says enough.
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        name = _bound_name(node)
        if name in EMPTY_NAMES and node not in fields:
            yield Fault(file, getattr(node, "lineno", 1), f"`{name}` does not say what the value is")


def _entries(node: _Documented) -> Iterator[tuple[str, str]]:
    """Yield the name and the first word of each entry of `Args` and `Attributes`."""
    is_list = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            is_list = line in ("Args:", "Attributes:")
        entry = re.match(r" {4}([\w`*][\w`, *]*): (\w+)", line)
        if is_list and entry:
            yield entry[1], entry[2]


def faults_of_tests(file: Path) -> Iterator[Fault]:
    """Yield the tests of a file whose names are too long, and the names in it that say nothing."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from _empty_names(file, tree)
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_") and len(name) > LONGEST_TEST_NAME:
            yield Fault(
                file, getattr(node, "lineno", 1), f"a test's name has {len(name)} characters of {LONGEST_TEST_NAME}"
            )


def _bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds: a variable or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def _is_property(node: _Documented) -> bool:
    """Return whether `Whether ...` is a noun phrase there: for a property, not for a function or a class."""
    return not isinstance(node, ast.Module | ast.ClassDef) and any(
        ast.unparse(decorator).endswith("property") for decorator in node.decorator_list
    )


def all_faults() -> list[Fault]:
    """Return the faults of the whole checkout."""
    product = (file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py")))
    faults = [fault for file in product for fault in product_faults(file)]
    return [*faults, *(fault for file in sorted((ROOT / "tests").rglob("*.py")) for fault in faults_of_tests(file))]


def subject_fault(message: str) -> str | None:
    """Return the fault of a commit message's subject, if there is one."""
    subject, _, _ = message.partition("\n")
    if len(subject) <= LONGEST_SUBJECT:
        return None
    return f"the subject has {len(subject)} characters of {LONGEST_SUBJECT}: say the rest in the body"


def newest_subject_faults(root: Path = ROOT) -> list[str]:
    """Return the faults of the newest commits' subjects; none in a folder that is no checkout."""
    if not (root / ".git").exists() or which("git") is None:
        return []
    command = ["git", "-C", str(root), "log", "-n", str(NEWEST_COMMITS), "--format=%h %s"]
    log = subprocess.run(command, capture_output=True, text=True, check=False)
    commits = (line.partition(" ") for line in log.stdout.splitlines())
    return [f"{commit}: {fault}" for commit, _, subject in commits if (fault := subject_fault(subject))]


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there are any."""
    if arguments[:1] == ["--message"]:
        fault = subject_fault(Path(arguments[1]).read_text(encoding="utf-8"))
        lines = [fault] if fault else []
    else:
        lines = [f"{file.relative_to(ROOT)}:{line}: {text}" for file, line, text in all_faults()]
        lines += newest_subject_faults()
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
