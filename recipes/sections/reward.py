"""`reward`: how answers are scored."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import PositiveFloat
from rlinf_core.scalars import Float, Text

REWARDS = ("exact", "boxed", "numeric", "symbolic")
RewardType = Annotated[Text, KnownOrOwn("reward_type", REWARDS)]


class RewardConfig(ConfigModel):
    """Scoring by rule."""

    group_name: Text = Field(default="RewardGroup", description="Name of the worker group; others address it by this.")
    reward_type: RewardType = Field(
        default="numeric",
        description="When an answer is right: exact (the same text), boxed (what \\boxed{} holds), numeric (the same"
        " number), symbolic (equal expressions), or `package.module:name`.",
    )
    correct_reward: Float = Field(default=1.0, description="Reward of a right answer.")
    incorrect_reward: Float = Field(default=0.0, description="Reward of any other.")
    timeout: PositiveFloat = Field(
        default=1.0, description="Seconds for scoring one answer; one that takes longer is left out."
    )
