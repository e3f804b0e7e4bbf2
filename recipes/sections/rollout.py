"""`rollout`: the workers that run the policy to make samples."""

from __future__ import annotations

from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, Fraction, NonNegativeFloat, OptionalPath, StepsOrNever
from rlinf_core.scalars import Bool, Text


class RolloutConfig(ConfigModel):
    """Settings of every rollout. Recipes add `backend` and the settings of their engines."""

    group_name: Text = Field(default="RolloutGroup", description="Name of the worker group; others address it by this.")
    model_dir: OptionalPath = Field(
        default=None,
        description="Folder of the model the rollout starts with, before the first weights from the actor. Default:"
        " `actor.model.model_path`.",
    )
    enable_offload: Bool = Field(
        default=False, description="Move the policy off its accelerators while other components use them."
    )


class SamplingConfig(ConfigModel):
    """The settings by which tokens are drawn."""

    temperature: NonNegativeFloat = Field(default=1.0, description="Divides the logits; 0: the likeliest token.")
    top_k: StepsOrNever = Field(default=-1, description="Draw among this many likeliest tokens; -1: among all.")
    top_p: Fraction = Field(default=1.0, description="Draw among the likeliest tokens of this total probability.")
    max_new_tokens: Count = Field(default=1024, description="Longest answer, in tokens.")
