"""Make the tables of docs/support.md from docs/support.yaml, and check that the tests which they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

DOCS: Final = Path(__file__).parent
TESTS: Final = DOCS.parent / "tests"
_CELL: Final = re.compile(r"R \d{4}-\d{2}-\d{2}|C|-")
_PLACE: Final = re.compile(r"(<!-- matrix -->\n).*?(<!-- end of matrix -->)", re.DOTALL)


def support_page() -> str:
    """Return the page with its tables made anew.

    Raises:
        ValueError: a cell is of no known form, there is no such test, or something ran that no test and no words tell.
    """
    tables: dict[str, Any] = YAML(typ="safe").load(DOCS / "support.yaml")
    text = "\n".join(_table(title, **table) for title, table in tables.items())
    page = (DOCS / "support.md").read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: f"{place[1]}\n{text}\n{place[2]}", page)


def _table(title: str, columns: list[str], rows: dict[str, Any]) -> str:
    head = ["", *columns, "what ran", "tests"]
    lines = [f"## {title}\n", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        cells: list[str] = row["cells"]
        if len(cells) != len(columns) or not all(map(_CELL.fullmatch, cells)):
            raise ValueError(f"{title}, {name}: {cells} are no cells of {columns}")
        marked = [re.sub(r"^R", "**R**", cell) for cell in cells]
        lines.append(f"| {name} | {' | '.join(marked)} | {row['run']} | {_kinds(row['tests'])} |")
    return "\n".join(lines) + "\n"


def _kinds(tests: list[str]) -> str:
    """Return the tests' names, each with `nightly` where `make check` leaves it to the night."""
    return ", ".join(f"`{Path(test.partition('::')[0]).stem}`{_mark(test)}" for test in tests)


def _mark(test: str) -> str:
    """Return ` (nightly)` or ` (GPU)` where marks of the test's module or function say so."""
    file, _, function = test.partition("::")
    path = TESTS / file
    if not path.is_file():
        raise ValueError(f"there is no test {test}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    if function and not functions:
        raise ValueError(f"there is no test {test}")
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    marks += [ast.unparse(decorator) for node in functions for decorator in node.decorator_list]
    text = " ".join(mark for mark in marks if "pytest.mark" in mark)
    return " (GPU)" if "mark.gpu" in text else " (nightly)" if "mark.nightly" in text else ""
