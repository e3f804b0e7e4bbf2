"""Recipes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.job import recipe as recipes
from rlinf_core.job.recipe import Recipe, UnknownRecipeError, find_recipe, recipe_names


def test_our_recipes_are_installed() -> None:
    assert {"embodied", "math"} <= set(recipe_names())


@pytest.mark.parametrize("name", ["embodied", "math"])
def test_recipe_names_what_can_be_loaded(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert {"recipe", "cluster"} <= set(recipe.config_model().model_fields)
    assert callable(recipe.check_function())


def test_unknown_recipe() -> None:
    with pytest.raises(UnknownRecipeError) as caught:
        find_recipe("embodyed")
    assert caught.value.help == "did you mean `embodied`?"


def test_what_a_recipe_names_may_be_missing() -> None:
    recipe = Recipe("x", "X.", "no_such_module:Config", "x", program="rlinf_core.errors:nothing")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        recipe.config_model()
    with pytest.raises(ConfigError, match="has no attribute 'nothing'"):
        recipe.program_function()
    assert recipe.check_function() is None


def test_an_install_older_than_the_source_tree_knows_its_recipes(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    assert recipes._of_source_tree(project) == []
    project.write_text('[project]\nname = "x"\n[project.entry-points."rlinf.recipes"]\nfound = "recipes.math:recipe"\n')
    (point,) = recipes._of_source_tree(project)
    assert (point.name, point.load().name) == ("found", "math")
    project.write_text("half a [file")
    assert recipes._of_source_tree(project) == []
