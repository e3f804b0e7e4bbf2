"""docs/migrate.md, of RLlib and LeRobot: the file shown is sound, and every key that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlinf_cli.job.field_docs import describe
from rlinf_cli.job.load import load_with_lint
from rlinf_core.errors import RLinfError
from rlinf_core.job.find_recipe import find_recipe

PAGE = (Path(__file__).parents[3] / "docs/migrate.md").read_text(encoding="utf-8")
# The page's sections, each with the recipe whose keys its table names.
SECTIONS_OF_PAGE = {"RLlib": "embodied", "LeRobot": "sft"}
SECTIONS = ("cluster", "runner", "env", "actor", "rollout", "algorithm", "data")
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})(?:\.\w+)+)")


def keys() -> list[tuple[str, str]]:
    """Return the section's recipe, and each key that a row of its table names in its second column."""
    rows = [
        (recipe, line.split("|")[2])
        for title, recipe in SECTIONS_OF_PAGE.items()
        for line in PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    return [(recipe, key) for recipe, cell in rows for key in KEY.findall(cell)]


@pytest.mark.parametrize(("recipe", "key"), keys())
def test_a_key_of_a_table_exists(recipe: str, key: str) -> None:
    # What a component is called is the user's.
    path = re.sub(r"^cluster\.component_placement\.\w+$", "cluster.component_placement", key)
    assert any(has_key(name, path) for name in (recipe, "embodied")), f"no recipe has `{path}`"


def has_key(recipe: str, path: str) -> bool:
    try:
        describe(find_recipe(recipe).config_model(), path)
    except (RLinfError, LookupError):
        return False
    return True


def test_a_key_that_no_recipe_has_is_seen() -> None:
    assert not has_key("embodied", "actor.optim.learning_speed")


def test_there_are_keys() -> None:
    assert len(keys()) > 30


def test_the_file_of_the_page_is_sound() -> None:
    (text,) = re.findall(r"^```yaml file=cartpole\.yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    job = load_with_lint("-", stdin=text.encode())
    assert job.ok
    assert [diagnostic.code for diagnostic in job.diagnostics if diagnostic.severity != "note"] == []
