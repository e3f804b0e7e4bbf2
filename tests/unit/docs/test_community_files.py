"""What a hosting site reads of the repository: the workflow, issue forms, and how to cite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlinf_core import __version__
from tests.unit.docs.test_docs import LINK

REPOSITORY = Path(__file__).parents[3]
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


def test_citation_names_this_version() -> None:
    assert YAML(typ="safe").load(REPOSITORY / "CITATION.cff")["version"] == __version__


@pytest.mark.parametrize("page", sorted(GITHUB.rglob("*.md")), ids=lambda page: page.name)
def test_links_of_community_pages_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
