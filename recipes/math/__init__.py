"""Reinforcement learning of language models on problems with verifiable answers."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="math",
    summary="GRPO on problems with verifiable answers: actor, rollout and reward workers",
    config="recipes.math.config:MathConfig",
    default_config="math/sums-laptop",
    program="recipes.math.program:program",
    check="recipes.math.config:check",
    export="recipes.language.trained_models:export_checkpoint",
    evaluate="recipes.language.trained_models:evaluate",
    facts="recipes.language.rules.job_rules:facts",
    memory="recipes.language.language_memory:forecast",
    trials="recipes.language.rules.job_rules:trials",
    inputs="recipes.language.rules.job_rules:inputs",
    convert="recipes.training.conversion.convert:convert_checkpoint",
    flow="recipes.language.language_flow:flow_of",
)
