"""`rollout`: the workers that run the policy to make samples."""

from __future__ import annotations

from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, Fraction, NonNegativeFloat, OptionalPath, StepsOrNever
from rlinf_core.scalars import Bool, Text


class RolloutConfig(ConfigModel):
    """Settings of every rollout. Recipes add `backend` and the settings of their engines."""

    group_name: Text = Field(
        default="RolloutGroup", description="Name of the worker group, by which other components address it."
    )
    model_dir: OptionalPath = Field(
        default=None,
        description="Folder of the model that rollouts start from, until the actor sends its first weights. Default:"
        " `actor.model.model_path`.",
    )
    enable_offload: Bool = Field(
        default=False, description="Offload the policy from its accelerators while other components use them."
    )


class SamplingConfig(ConfigModel):
    """The settings by which tokens are drawn."""

    temperature: NonNegativeFloat = Field(
        default=1.0, description="Sampling temperature: divides the logits; 0: greedy."
    )
    top_k: StepsOrNever = Field(default=-1, description="Sample from this many most likely tokens; -1: from all.")
    top_p: Fraction = Field(default=1.0, description="Sample from the most likely tokens up to this total probability.")
    max_new_tokens: Count = Field(default=1024, description="Maximum answer length, in tokens.")
