"""The parts of our recipes are the functions that pyright holds against their protocols."""

from __future__ import annotations

import pytest

from rlinf_core import Recipe
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from tests.unit.recipes.typed_recipes import RECIPES

_NO_PARTS = {"name", "summary", "default_config", "training_data", "variants", "elastic"}


def test_all_recipes_are_typed() -> None:
    assert [recipe.name for recipe in RECIPES] == recipe_names()


@pytest.mark.parametrize("typed", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_named_parts_are_the_typed_functions(typed: Recipe) -> None:
    recipe = find_recipe(typed.name)
    parts = [name for name in Recipe._fields if name not in _NO_PARTS]
    assert {name: recipe.load(getattr(recipe, name)) for name in parts} == {
        name: getattr(typed, name) for name in parts
    }
