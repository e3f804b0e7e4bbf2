"""A training service: clients of the Tinker SDK train adapters of one model, and sample from them."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="serve",
    summary="Serve training and sampling to clients of the Tinker SDK: actor and rollout workers (`rlinf serve`)",
    config="recipes.serve.config:ServeConfig",
    default_config="serve/sums-laptop",
    program="recipes.serve.serve_program:program",
    check="recipes.serve.config:check",
    inputs="recipes.serve.config:inputs",
)
