"""`rollout`: the workers that run the policy to make samples."""

from __future__ import annotations

from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.scalars import Bool, Text


class RolloutConfig(ConfigModel):
    """Settings of every rollout. Recipes add those of their engines."""

    group_name: Text = Field(
        default="RolloutGroup", description="Name of the worker group, by which other components address it."
    )
    enable_offload: Bool = Field(
        default=False, description="Offload the policy from its accelerators while other components use them."
    )
