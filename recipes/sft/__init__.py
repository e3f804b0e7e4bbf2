"""Supervised fine-tuning of policies on demonstrations."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="sft",
    summary="Learn a policy from demonstrations: actor workers, and rollout and env workers to evaluate it",
    config="recipes.sft.config:SftConfig",
    default_config="sft_laptop",
    program="recipes.sft.program:program",
    check="recipes.sft.config:check",
    facts="recipes.embodied.config:facts",
    curve="recipes.training.curve:draw_curve",
    record="recipes.embodied.recording:record",
    policy="recipes.embodied.trained_policy:load",
    export="recipes.embodied.exporting:export",
    play="recipes.embodied.playing:play",
    evaluate="recipes.embodied.evaluation:evaluate",
    memory="recipes.sft.memory:forecast",
    training_data=("data.train_data_paths",),
)
