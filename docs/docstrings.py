"""A check of docstrings: `python -m docs.docstrings` lists those that open with a relative clause.

The first line of a docstring is a sentence in the imperative mood for a function, and a noun phrase for a class, a
module or a property: "Return the rank", "The rank of a process". ruff (D401) checks the mood, this module the
first word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("rlinf_core", "rlinf_cli", "recipes", "benchmarks", "docs")

_RELATIVE: Final = frozenset({"How", "That", "What", "Where", "Which", "Who", "Whom", "Whose"})
_Node: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A docstring that opens with a relative clause."""

    file: Path
    line: int
    text: str


def faults_of(file: Path) -> Iterator[Fault]:
    """Yield the docstrings of a file that open with a relative clause."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, _Node):
            continue
        first, _, _ = (ast.get_docstring(node) or "").partition("\n")
        word = re.match(r"\w*", first)
        if word and (word[0] in _RELATIVE or (word[0] == "Whether" and not _is_property(node))):
            yield Fault(file, node.body[0].lineno, first)


def _is_property(node: _Node) -> bool:
    """Return whether `Whether ...` is a noun phrase there: for a property, not for a function or a class."""
    return not isinstance(node, ast.Module | ast.ClassDef) and any(
        ast.unparse(each).endswith("property") for each in node.decorator_list
    )


def all_faults() -> list[Fault]:
    """Return the faults of all packages."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return [fault for file in files for fault in faults_of(file)]


def main() -> int:
    """Print the faults; return 1 if there are any."""
    found = all_faults()
    for file, line, text in found:
        print(f"{file.relative_to(ROOT)}:{line}: a docstring opens with a relative clause: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
