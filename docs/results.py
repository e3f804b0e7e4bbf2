"""The results that pages show: the tables of docs/support.md from support.yaml, and the curves of results.yaml."""

from __future__ import annotations

import ast
import re
from html import escape
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


_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 480, 280, 44, 34, 16, 44
_COLOURS: Final = ("#2f6fde", "#d9702b", "#3d9a50")
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#3b4252}.title{font-weight:bold;font-size:13px}"
    "polyline{fill:none;stroke-width:2}.grid{stroke:#d8dde6}"
)


def curves() -> str:
    """Return the picture."""
    panels: list[dict[str, Any]] = YAML(typ="safe").load(DOCS / "results.yaml")
    rows = -(-len(panels) // 2)
    drawn = [
        f'<g transform="translate({number % 2 * _WIDTH},{number // 2 * _HEIGHT})">{_panel(**panel)}</g>'
        for number, panel in enumerate(panels)
    ]
    size = f'width="{2 * _WIDTH}" height="{rows * _HEIGHT}" viewBox="0 0 {2 * _WIDTH} {rows * _HEIGHT}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n{background}\n'
    return head + "\n".join(drawn) + "\n</svg>\n"


def _panel(title: str, x: str, lines: dict[str, list[list[list[float]]]]) -> str:
    end = max(point[0] for runs in lines.values() for run in runs for point in run)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(point: list[float]) -> str:
        return f"{_LEFT + point[0] / end * (right - _LEFT):.1f},{bottom - point[1] * (bottom - _TOP):.1f}"

    parts = [f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>']
    for level in (0, 0.5, 1):
        y = bottom - level * (bottom - _TOP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{level:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{end:,.0f} {escape(x)}</text>')
    for number, (name, runs) in enumerate(lines.items()):
        colour = _COLOURS[number]
        parts += [f'<polyline stroke="{colour}" points="{" ".join(map(place, run))}"/>' for run in runs]
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
        label = f"{escape(name)}, {seeds}"
        parts.append(f'<text x="{_LEFT + number * 140}" y="{bottom + 36}" style="fill:{colour}">{label}</text>')
    return "".join(parts)
