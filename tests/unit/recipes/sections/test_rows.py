"""Tables of jobs that a recipe takes or refuses: a row is a job and what is reported of it.

A job's parts are joined by ` & `: `@ components` says where components are placed (`actor@0:0-7`: on eight ranks;
without it all of the recipe are on one node), `section: {...}` is written into the file, `key=value` overrides it, `-`
adds nothing, and `$NAME` stands for what follows `$NAME = ` at the head. After `=>` follow code, «underlined text», and
the names and numbers of the message and its help: their words are free to change.
`python -m tests.unit.recipes.sections.test_rows` writes anew what follows `=>`: read its diff.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlinf_cli.job.job_file import load_with_lint

TABLES = sorted((Path(__file__).parent / "rows").glob("*.txt"))
COMPONENTS = {
    "agent": "actor,rollout,reward,agent",
    "embodied": "actor,rollout,env",
    "math": "actor,rollout,reward",
    "sft": "actor,rollout,env",
}


def names_of(table: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\$\w+) = (.*)$", table.read_text(), re.MULTILINE))


def rows_of(table: Path) -> list[str]:
    return [line for line in table.read_text().splitlines() if _is_row(line)]


def _is_row(line: str) -> bool:
    return bool(line) and not re.match(r"#|\$\w+ = ", line)


def reported(table: Path, row: str, folder: Path) -> str:
    """Return what follows `=>`."""
    recipe, job = table.stem, row.partition(" =>")[0]
    for name, meaning in names_of(table).items():
        job = job.replace(name, meaning)
    parts = [part for part in job.split(" & ") if part != "-"]
    overrides = [part for part in parts if re.match(r"~?[\w.]+=", part)]
    sections = [part for part in parts if part not in overrides and not part.startswith("@")]
    if not any(section.startswith("cluster:") for section in sections):
        (words,) = [part for part in parts if part.startswith("@")] or [f"@ {COMPONENTS[recipe]}"]
        placed = ", ".join(map(_placed, words.split()[1:]))
        sections.insert(0, f"cluster: {{num_nodes: 1, component_placement: {{{placed}}}}}")
    path = folder / "job.yaml"
    path.write_text("\n".join((f"recipe: {recipe}", *sections, "")))
    return "; ".join(
        f"{item.code} «{item.span.text}» {_facts(f'{item.message} {item.help}')}".strip()
        for item in load_with_lint(str(path), overrides, environ={}).diagnostics
    )


def _placed(words: str) -> str:
    components, _, ranks = words.partition("@")
    return f"'{components}': {{node_group: node, placement: '{ranks or 0}'}}"


def _facts(message: str) -> str:
    """Return the names and numbers, but for what the machine adds and for long lists, which grow with the product."""
    for here, text in ((sys.executable, "python"), (f"{Path.cwd()}/", ""), (str(Path.cwd()), ".")):
        message = message.replace(here, text)
    message = re.sub(r"\S*site-packages\S*", "", message)
    short = re.sub(r"(`[^`]*`(, | and | or )){7,}`[^`]*`", "", re.sub(r"(?<![`\w:/])/\S*", "", message))
    return " ".join(re.findall(r"`[^`]*`|\b\d[\d.]*(?:e[-+]?\d+)?\b", short))


@pytest.mark.parametrize(("table", "row"), [(table, row) for table in TABLES for row in rows_of(table)])
def test_a_job_is_answered_as_the_table_says(tmp_path: Path, table: Path, row: str) -> None:
    assert reported(table, row, tmp_path) == row.partition(" =>")[2].strip()


def _write(table: Path) -> None:
    with TemporaryDirectory() as folder:
        lines = [
            f"{line.partition(' =>')[0]} => {reported(table, line, Path(folder))}".rstrip() if _is_row(line) else line
            for line in table.read_text().splitlines()
        ]
    table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for table in TABLES:
        _write(table)
