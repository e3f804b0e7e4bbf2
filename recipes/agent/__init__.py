"""Reinforcement learning of language models that act: many turns, tools, users' agents."""

from __future__ import annotations

from rlinf_core import Recipe
from rlinf_core.process.public_names import public_names

__getattr__, __dir__ = public_names(__name__, __file__)

recipe = Recipe(
    name="agent",
    summary="GRPO on agents with tools and many turns: actor, rollout, reward and agent workers",
    config="recipes.agent.agent_config:AgentConfig",
    default_config="agent/calculator-laptop",
    program="recipes.agent.agent_runner:program",
    check="recipes.agent.agent_rules:check",
    export="recipes.language.trained_models:export_checkpoint",
    facts="recipes.language.rules.job_rules:facts",
    memory="recipes.agent.agent_memory:forecast",
    placement_notes="recipes.agent.agent_memory:placement_notes",
    inputs="recipes.agent.agent_config:inputs",
    trials="recipes.agent.agent_config:trials",
    convert="recipes.training.conversion.convert:convert_checkpoint",
    flow="recipes.language.language_flow:flow_of",
    collect="recipes.agent.boxes.image_store:collect",
)
