"""Supervised fine-tuning of policies on demonstrations."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="sft",
    summary="Learn a policy from demonstrations: actor workers, and rollout and env workers to evaluate it",
    config="recipes.sft.config:SftConfig",
    default_config="sft_laptop",
    program="recipes.sft.sft_program:program",
    check="recipes.sft.config:check",
    facts="recipes.embodied.config:facts",
    record="recipes.embodied.using.recording:record",
    policy="recipes.embodied.using.trained_policy:load",
    export="recipes.embodied.using.exporting:export",
    play="recipes.embodied.using.playing:play",
    evaluate="recipes.embodied.using.evaluation:evaluate",
    memory="recipes.sft.sft_memory:forecast",
    variants={"data.type=chat": "sft_chat", "data.type=sums": "sft_chat"},
    training_data=("data.train_data_paths",),
)
