"""Pages: links, names, style, and what each must say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from docs import style
from docs.generate import pages
from docs.media import PICTURE
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.main import main
from rlinf_core import __version__
from rlinf_core.config.diagnostics import render_text
from rlinf_core.env_vars import REGISTER
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_state import RunState

REPOSITORY = Path(__file__).parents[3]
WRITTEN = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# The site leaves out `dev`, notes for those who change the code.
PAGES = [page for page in WRITTEN[1:] if page.parent.name != "dev"]
LINKED = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)#]+)")
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
        link for link in LINKED.findall(page.read_text(encoding="utf-8")) if not (page.parent / link.strip()).exists()
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
    shown = set(
        re.findall(r"`(RLINF_\w+)`", page.partition("## Environment variables: RLINF_*\n")[2].partition("\n## ")[0])
    )
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
    examples = (path for path in (REPOSITORY / "examples").rglob("*.*") if path.suffix != ".pyc")
    shown = [*WRITTEN, *sorted(examples)]
    assert any(path.name == "own_recipe.py" for path in shown)
    deep = {path.name: matches for path in shown if (matches := DEEP.findall(path.read_text(encoding="utf-8")))}
    assert deep == {}


def test_deep_import_is_seen() -> None:
    assert DEEP.findall("from recipes.embodied.envs import x\n    import rlinf_core.job\n") == [
        "recipes.embodied.envs",
        "rlinf_core.job",
    ]
    assert DEEP.findall("from recipes.embodied import x\nfrom rlinf_core import y\n") == []


GITHUB = REPOSITORY / ".github"
SCHEMAS = {
    "citation-file-format": [REPOSITORY / "CITATION.cff"],
    "github-workflows": sorted((GITHUB / "workflows").iterdir()),
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE/bug.yml", GITHUB / "ISSUE_TEMPLATE/feature.yml"],
}


@pytest.mark.parametrize(("schema", "files"), SCHEMAS.items(), ids=SCHEMAS)
def test_community_files_match_their_schemas(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    if schema == "citation-file-format":
        command.append("--default-filetype=yaml")
    checked = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    assert files
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_workflow_runs_what_people_run() -> None:
    workflow = YAML(typ="safe").load(GITHUB / "workflows/check.yml")
    assert [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step] == [".ci/run"]


def test_the_lock_file_is_of_todays_requirements() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = tomllib.loads((REPOSITORY / "uv.lock").read_text(encoding="utf-8"))["package"]
    (own,) = (package for package in locked if package["name"] == project["name"])
    extras = {extra: map(Requirement, listed) for extra, listed in project["optional-dependencies"].items()}
    asked = {
        ("", canonicalize_name(need.name), str(need.specifier)) for need in map(Requirement, project["dependencies"])
    }
    # Extras of extras are written out in the lock file.
    asked |= {
        (extra, canonicalize_name(need.name), str(need.specifier))
        for extra, needs in extras.items()
        for need in needs
        if need.name != project["name"]
    }
    kept = {
        (extra[1] if (extra := re.search(r"extra == '(\w+)'", need.get("marker", ""))) else "", need["name"], spec)
        for need in own["metadata"]["requires-dist"]
        for spec in [str(SpecifierSet(need.get("specifier", "")))]
    }
    assert sorted(asked - kept) == [], "run `uv lock`, and commit uv.lock"


def test_citation_names_this_version() -> None:
    assert YAML(typ="safe").load(REPOSITORY / "CITATION.cff")["version"] == __version__


@pytest.mark.parametrize("page", sorted(GITHUB.rglob("*.md")), ids=lambda page: page.name)
def test_links_of_community_pages_lead_somewhere(page: Path) -> None:
    links = LINKED.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RUN, TYPO = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"[^\W_]+", re.sub(r"\]\([^)]*\)", "]", prose))
    assert len(words) <= 300


def test_readme_shows_the_run_of_its_picture() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    frames = ElementTree.parse(PICTURE).findall(f".//{svg}g[@id='run']/{svg}g")
    rows: dict[str, str] = {}
    for text in frames[-1].iter(f"{svg}text"):
        row = text.attrib["y"]
        rows[row] = f"{rows.get(row, '')} {text.text}".strip()
    shown = {" ".join(row.split()) for row in rows.values()}
    lines = [" ".join(line.split()) for line in RUN.splitlines()]
    assert 4 <= len(lines) <= 7
    assert [line for line in lines if line not in shown] == []


def test_readme_shows_a_typo_as_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = (REPOSITORY / "configs/embodied/pick-laptop.yaml").read_text(encoding="utf-8")
    Path("job.yaml").write_text(shipped.replace("task: pick", "task: pik"), encoding="utf-8")
    assert main(["validate", "job.yaml"]) == ExitCode.INVALID
    assert capsys.readouterr().out.startswith(TYPO)


def test_readme_has_a_command_for_every_recipe() -> None:
    commands = re.findall(r"`rlinf (?:train recipe=|(?=serve ))(\w+)", README)
    # A variant is what a recipe becomes by its data.
    variants = {variant for name in recipe_names() for variant in find_recipe(name).variants.values()}
    assert sorted(set(commands)) == sorted(set(recipe_names()) - variants)


PAGE = Path(__file__).parents[3] / "docs" / "dev" / "run-files.md"
_FIELD = re.compile(r"`(\w+)`")


def listed(head: str) -> list[str]:
    """The names in the first column of the table with this head."""
    table = PAGE.read_text(encoding="utf-8").split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    return [name for row in rows for name in _FIELD.findall(row.split("|")[1])]


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        ("field", [*RunState.model_fields]),
        ("field of `manifest.json`", [*(set(Manifest.model_fields) - {"schema_"})]),
    ],
)
def test_a_table_lists_exactly_the_fields_of_its_model(head: str, fields: list[str]) -> None:
    names = listed(head)
    assert sorted(names) == sorted(["schema", *fields])


SEEDS = REPOSITORY / "tests/integration/runtime/seeds"


def statements(text: str) -> list[str]:
    """Return the statements of a program, whatever their layout and comments."""
    return [ast.dump(statement) for statement in ast.parse(text).body]


def test_programs_of_the_page_are_those_that_run() -> None:
    page = (REPOSITORY / "docs/embodied.md").read_text(encoding="utf-8")
    entry, loop = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert statements(entry) == statements((SEEDS / "training_flow.txt").read_text(encoding="utf-8"))
    assert statements(loop) == statements((SEEDS / "training_loop.txt").read_text(encoding="utf-8"))[-1:]


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ('"""What it is."""', True),
        ('"""The thing."""', False),
        ('class A:\n    """Who asks."""', True),
        ('def f():\n    """Whether it is."""', True),
        ('def f():\n    """Return whether it is."""', False),
        ('class A:\n    @property\n    def f(self):\n        """Whether it is."""', False),
        ('class A:\n    @property\n    def f(self):\n        """Where it is."""', True),
        ('async def f():\n    """How it goes."""', True),
        ("def f():\n    return 1", False),
        ('def f():\n    """Whatever it takes, take it."""', False),
        ("found = 1", True),
        ("for each in (): pass", True),
        ("def f(told): pass", True),
        ("rows = [row for row in ()]", False),
        ("if (given := 1): pass", True),
        ("print(given)", False),
        ("class A:\n    found: int", False),
        ('def f(seed):\n    """Return it.\n\n    Args:\n        seed: of the split.\n    """', True),
        ('def f(seed):\n    """Return it.\n\n    Args:\n        seed: the seed: of the split.\n    """', False),
        ('def f():\n    """Return it.\n\n    Raises:\n        E: of nothing.\n    """', False),
    ],
)
def test_product_faults_are_docstrings_and_names(code: str, bad: bool, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    assert bool(list(style.product_faults(file))) is bad


@pytest.mark.parametrize(("length", "bad"), [(60, False), (61, True)])
def test_long_test_names_are_faults(length: int, bad: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_code.py"
    file.write_text(f"def test_{'x' * (length - 5)}(): pass")
    assert bool(list(style.faults_of_tests(file))) is bad


@pytest.mark.parametrize(("length", "bad"), [(72, False), (73, True)])
def test_long_subjects_are_faults(length: int, bad: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("x" * length + "\n\n" + "y" * 200)
    assert style.main(["--message", str(message)]) == int(bad)


def test_long_subjects_of_the_newest_commits_are_faults(tmp_path: Path) -> None:
    assert style.newest_subject_faults(tmp_path) == []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for subject in ("x" * 72, "y" * 73):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject, "-m", "z" * 200], check=True)
    (fault,) = style.newest_subject_faults(tmp_path)
    assert "the subject has 73 characters of 72" in fault


def test_empty_names_in_tests_are_faults(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a():\n    found = 1\n    assert found\n")
    assert [fault.text for fault in style.faults_of_tests(file)] == ["`found` does not say what the value is"]
