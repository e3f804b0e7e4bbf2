"""The pages of docs/: those made from the code are current, and the examples of the written ones hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from docs.generate import pages
from rlinf_cli.job.load import load_with_lint
from rlinf_core.config.render import render_text
from rlinf_core.env_vars import REGISTER
from rlinf_core.job.find_recipe import recipe_names

REPOSITORY = Path(__file__).parents[3]
WRITTEN = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# The site leaves out `dev`, notes for those who change the code.
PAGES = [page for page in WRITTEN[1:] if page.parent.name != "dev"]
LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)")
ANCHOR = re.compile(r"\[[^\]]+\]\((?!https?://)([^)#]*)#([^)]+)\)")
WHOLE_FILE = re.compile(r"^```yaml\n((?:recipe: \w+\n)?cluster:\n.*?)^```", re.MULTILINE | re.DOTALL)


DEEP = re.compile(r"^ *(?:from|import) ((?:recipes\.\w+|rlinf_core)\.\S+)", re.MULTILINE)


MADE = pages()


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_made_pages_are_current(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page], "run `make docs`"


def test_reference_has_each_key_once() -> None:
    everything: set[str] = set()
    for name in ("cluster", *recipe_names()):
        text = (REPOSITORY / f"docs/reference/{name}.md").read_text(encoding="utf-8")
        keys = re.findall(r"^\| `([^`]+)` \|", text, re.M)
        assert [key for key in set(keys) if keys.count(key) > 1] == []
        everything.update(keys)
    assert len(everything) > 300


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link.strip()).exists()
    ]
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them, and those that it sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return slugs | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_anchors_of_links_exist(page: Path) -> None:
    links = ANCHOR.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, anchor) for file, anchor in links]
    assert [anchor for target, anchor in targets if target.suffix == ".md" and anchor not in anchors(target)] == []


def pages_of_nav(entries: Any) -> list[str]:
    """Return the pages below an entry of the site's navigation."""
    if isinstance(entries, str):
        return [entries]
    below = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in below for page in pages_of_nav(entry)]


def test_navigation_has_every_page_once() -> None:
    nav = YAML(typ="safe").load(REPOSITORY / "mkdocs.yml")["nav"]
    assert "Reference" in nav[-1], "pages that are made come last"
    written = [page.relative_to(REPOSITORY / "docs").as_posix() for page in PAGES]
    assert sorted(pages_of_nav(nav)) == sorted([*written, "api.md", "changes.md", "examples.md"])


def test_overviews_lead_to_the_pages_of_their_folders() -> None:
    docs = REPOSITORY / "docs"
    below = [page for page in PAGES if page.parent != docs]
    unnamed = [
        page.name
        for page in below
        if f"({page.relative_to(docs)}" not in page.parent.with_suffix(".md").read_text(encoding="utf-8")
    ]
    assert len(below) > 10
    assert unnamed == []


def whole_files() -> list[tuple[str, str]]:
    """Return the complete configuration files that are shown in pages written by hand."""
    return [
        (f"{page.name}-{index}", text)
        for page in WRITTEN
        if page not in MADE
        for index, text in enumerate(WHOLE_FILE.findall(page.read_text(encoding="utf-8")))
        if "num_nodes" in text
    ]


@pytest.mark.parametrize(("name", "text"), whole_files(), ids=[name for name, _ in whole_files()])
def test_files_shown_are_valid(name: str, text: str) -> None:
    errors = [item for item in load_with_lint("-", stdin=text.encode()).diagnostics if item.severity == "error"]
    # Some name a module that is the reader's.
    wrong = [item for item in errors if "there is no module" not in item.message]
    assert not wrong, "\n".join(render_text(diagnostic) for diagnostic in wrong)


def test_the_files_of_the_glossary_are_there() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (REPOSITORY / "docs/dev/glossary.md").read_text(), re.M)
    missing = [
        (term, file)
        for term, file in rows
        if not (REPOSITORY / file).exists() and not (REPOSITORY / "rlinf_core" / file).exists()
    ]
    assert len(rows) >= 40
    assert len({term for term, _ in rows}) == len(rows)
    assert not missing


def test_reading_path_stays_short() -> None:
    made = {"reference.md", "diagnostics.md", "commands.md"}
    written = [page for page in PAGES if page.parent.name == "docs" and page.name not in made]
    assert len(written) <= 25
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in written) <= 45_000


def test_environment_variables_are_on_the_page() -> None:
    page = (REPOSITORY / "docs/config.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`(RLINF_\w+)`", page.partition("## Environment variables")[2].partition("\n## ")[0]))
    assert shown == set(REGISTER)


ARCHITECTURE = (REPOSITORY / "docs/dev/architecture.md").read_text(encoding="utf-8")


def files_named(text: str) -> list[str]:
    """Return the Python files that a text names, from the repository's root.

    A bare name is beside the file before it, or anywhere in a package.
    """
    results: list[str] = []
    for name in re.findall(r"`([\w/]+\.py)`", text):
        tried = [name, f"rlinf_core/{name}", *(f"{Path(result).parent}/{name}" for result in results[-1:])]
        tried += [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "rlinf_core").rglob(name)]
        results.append(next((item for item in tried if (REPOSITORY / item).exists()), f"missing: {name}"))
    return results


def test_the_files_of_the_architecture_are_there() -> None:
    # A row of a table and a paragraph at a time: a bare file name belongs to the path before it there.
    named = [file for part in re.split(r"\n\n|\n(?=[|\d*])", ARCHITECTURE) for file in files_named(part)]
    assert len(named) > 130
    assert [item for item in named if item.startswith("missing")] == []


@pytest.mark.parametrize(
    ("walk", "files"), [("a placement string", 12), ("an environment variable", 8), ("a training step", 17)]
)
def test_a_walk_has_few_stops(walk: str, files: int) -> None:
    section = ARCHITECTURE.partition(f"## Walk of {walk}\n")[2].partition("\n## ")[0]
    assert 0 < len(set(files_named(section))) <= files


def test_the_walk_of_a_small_payload_counts_its_files() -> None:
    section = ARCHITECTURE.partition("## Walk of a small payload\n")[2].partition("\n## ")[0]
    putting, _, channel = section.partition("Then the channel's process:")
    putting_files = set(files_named(putting))
    extra = set(files_named(channel)) - putting_files
    assert f"{len(putting_files | extra)} files: {len(putting_files)} in" in section
    assert len(putting_files) <= 15


def test_pages_and_examples_import_from_front_doors() -> None:
    shown = [*WRITTEN, *sorted((REPOSITORY / "examples").rglob("*.*"))]
    assert any(path.name == "own_recipe.py" for path in shown)
    deep = {path.name: matches for path in shown if (matches := DEEP.findall(path.read_text(encoding="utf-8")))}
    assert deep == {}


def test_deep_import_is_seen() -> None:
    assert DEEP.findall("from recipes.embodied.envs import x\n    import rlinf_core.job\n") == [
        "recipes.embodied.envs",
        "rlinf_core.job",
    ]
    assert DEEP.findall("from recipes.embodied import x\nfrom rlinf_core import y\n") == []
