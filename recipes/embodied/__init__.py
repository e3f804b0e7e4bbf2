"""Reinforcement learning of policies that act in environments, simulated or real."""

from __future__ import annotations

from rlinf_core import Recipe
from rlinf_core.process.public_names import public_names

__getattr__, __dir__ = public_names(__name__, __file__)

recipe = Recipe(
    name="embodied",
    summary="PPO or GRPO on simulated or real robots: actor, rollout and env workers",
    config="recipes.embodied.config:EmbodiedConfig",
    default_config="embodied/pick-laptop",
    program="recipes.embodied.program:program",
    check="recipes.embodied.rules.job_check:check",
    facts="recipes.embodied.config:facts",
    trials="recipes.embodied.interpreters.locked_venvs:trials",
    record="recipes.embodied.using.recording:record",
    evaluate="recipes.embodied.using.evaluation:evaluate",
    policy="recipes.embodied.using.trained_policy:load",
    export="recipes.embodied.using.exporting:export",
    play="recipes.embodied.using.evaluation:play",
    replay="recipes.embodied.loop.env_errors:replay",
    memory="recipes.embodied.embodied_memory:forecast",
    inputs="recipes.embodied.config:inputs",
    flow="recipes.embodied.embodied_flow:flow_of",
    training_data=("data.train_data_paths",),
    convert="recipes.training.conversion.convert:convert_checkpoint",
    elastic=("env", "rollout"),
)
