"""Recipes by name."""

from __future__ import annotations

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.job.find_recipe import UnknownRecipeError, find_recipe, recipe_names
from rlinf_core.job.recipe import Recipe


def test_our_recipes_are_installed() -> None:
    assert {"embodied", "math"} <= set(recipe_names())


@pytest.mark.parametrize("name", ["embodied", "math"])
def test_recipe_names_what_can_be_loaded(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert {"recipe", "cluster"} <= set(recipe.config_model().model_fields)
    assert callable(recipe.load(recipe.check))


def test_unknown_recipe() -> None:
    with pytest.raises(UnknownRecipeError) as caught:
        find_recipe("embodyed")
    assert caught.value.help == "did you mean `embodied`?"


def test_what_a_recipe_names_may_be_missing() -> None:
    recipe = Recipe("x", "X.", "no_such_module:Config", "x", program="rlinf_core.errors:nothing")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        recipe.config_model()
    with pytest.raises(ConfigError, match="has no attribute 'nothing'"):
        recipe.load(recipe.program)
    assert recipe.load(recipe.check) is None
