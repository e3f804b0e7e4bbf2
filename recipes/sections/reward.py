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

    group_name: Text = Field(
        default="RewardGroup", description="Name of the worker group, by which other components address it."
    )
    reward_type: RewardType = Field(
        default="numeric",
        description="How an answer is judged correct: exact (same text), boxed (contents of \\boxed{}), numeric (same"
        " number), symbolic (equal expressions), or `package.module:name`.",
    )
    correct_reward: Float = Field(default=1.0, description="Reward of a correct answer.")
    incorrect_reward: Float = Field(default=0.0, description="Reward of any other answer.")
    timeout: PositiveFloat = Field(
        default=1.0, description="Time limit for scoring one answer, in seconds; an answer that exceeds it is dropped."
    )
