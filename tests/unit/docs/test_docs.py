"""The pages of docs/: those made from the code are current, and the examples of the written ones hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import pages
from rlinf_core.config.render import render_text
from rlinf_core.job.load import load_job

REPOSITORY = Path(__file__).parents[3]
WRITTEN = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)")
YAML = re.compile(r"^```yaml\n(cluster:\n.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_made_pages_are_current(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == pages()[page], "run `make docs`"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link.strip()).exists()
    ]
    assert not broken


def test_the_readme_leads_to_every_page() -> None:
    named = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in WRITTEN[1:] if f"(docs/{page.name})" not in named] == []


def whole_files() -> list[tuple[str, str]]:
    """Return the complete configuration files that are shown in pages written by hand."""
    made = {page.name for page in pages()}
    return [
        (f"{page.name}-{index}", text)
        for page in WRITTEN
        if page.name not in made
        for index, text in enumerate(YAML.findall(page.read_text(encoding="utf-8")))
        if "num_nodes" in text
    ]


@pytest.mark.parametrize(("name", "text"), whole_files(), ids=[name for name, _ in whole_files()])
def test_files_shown_are_valid(name: str, text: str) -> None:
    job = load_job("-", stdin=text.encode())
    assert job.ok, "\n".join(render_text(diagnostic) for diagnostic in job.diagnostics)


def test_the_files_of_the_glossary_are_there() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (REPOSITORY / "docs/glossary.md").read_text(), re.M)
    missing = [
        (term, file)
        for term, file in rows
        if not (REPOSITORY / file).exists() and not (REPOSITORY / "rlinf_core" / file).exists()
    ]
    assert len(rows) >= 40
    assert len({term for term, _ in rows}) == len(rows)
    assert not missing
