"""`rlinf recipes`: list the installed recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Recipe

SCHEMA = "rlinf.recipes/1"


def recipes(output: OutputOption = Output.TEXT, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the installed recipes and their configs."""
    from rlinf_cli.run.runnable import obstacle

    installed = _listed()
    if output is Output.JSON:
        records = [
            {
                "name": recipe.name,
                "summary": recipe.summary,
                "default_config": recipe.default_config,
                "runnable": obstacle(recipe) is None,
                "obstacle": obstacle(recipe),
            }
            for recipe in installed
        ]
        console.result_json({"schema": SCHEMA, "recipes": records})
        return
    rows = [(recipe.name, _config_of(recipe), recipe.summary) for recipe in installed]
    console.result(console.table(("recipe", "config", "what"), rows, keep=(0, 1)))
    for recipe in installed:
        why = obstacle(recipe)
        if why is not None:
            console.result(f"\n`{recipe.name}` cannot be run: {why}")
    console.message("\n`rlinf inspect config CONFIG` shows a config with all its defaults.")


app = command(recipes, examples=("rlinf recipes", "rlinf recipes --output json"))


def _config_of(recipe: Recipe) -> str:
    """Return what names the config that a recipe starts from."""
    from pathlib import Path

    from rlinf_cli.live.run_summary import shown

    own = recipe.default_config
    return f"recipe={recipe.name}" if "\n" in own else shown(Path(own))


def _listed() -> list[Recipe]:
    """Return every installed recipe; report one that cannot be loaded on standard error."""
    from rlinf_core.errors import ConfigError
    from rlinf_core.job.find_recipe import find_recipe, recipe_names

    loaded: list[Recipe] = []
    for name in recipe_names():
        try:
            loaded.append(find_recipe(name))
        except ConfigError as error:
            console.error_block(error.message, why=error.why, do=error.help)
    return loaded
