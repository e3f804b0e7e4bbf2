"""Reinforcement learning of policies that act in environments, simulated or real."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="embodied",
    summary="PPO or GRPO on simulated or real robots: actor, rollout and env workers",
    config="recipes.embodied.config:EmbodiedConfig",
    default_config="laptop",
    program="recipes.embodied.program:program",
    check="recipes.embodied.rules:check",
    facts="recipes.embodied.config:facts",
    curve="recipes.training.curve:draw_curve",
    trials="recipes.embodied.interpreters:trials",
    record="recipes.embodied.recording:record",
    evaluate="recipes.embodied.evaluation:evaluate",
    policy="recipes.embodied.trained_policy:load",
    export="recipes.embodied.exporting:export",
    play="recipes.embodied.playing:play",
    memory="recipes.embodied.memory:forecast",
    savings="recipes.embodied.memory_savings:savings",
    inputs="recipes.embodied.config:inputs",
    training_data=("data.train_data_paths",),
)
