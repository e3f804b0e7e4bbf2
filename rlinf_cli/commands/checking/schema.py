"""`rlinf schema`: the JSON Schema of job files, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command


def schema(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="Only for files of this recipe.",
            autocompletion=completion.recipes,
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print the JSON Schema of job files, for editors.

    Save it, as in `rlinf schema > rlinf.schema.json`, and start a file with the line
    `# yaml-language-server: $schema=rlinf.schema.json`.
    """
    from rlinf_cli.file.json_schema import file_schema, json_schema
    from rlinf_core.job.find_recipe import find_recipe, recipe_names

    if recipe is not None:
        console.result_json(json_schema(find_recipe(recipe).config_model()))
    else:
        recipes = {name: find_recipe(name) for name in recipe_names()}
        models = {name: recipe.config_model() for name, recipe in recipes.items()}
        console.result_json(file_schema(models, {name: recipe.variants for name, recipe in recipes.items()}))


app = command(schema, examples=("rlinf schema > rlinf.schema.json",))
