"""`data`: prompts and answers of a reasoning job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from recipes.sections.values import FilePaths
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, Seed
from rlinf_core.scalars import Bool, Int, Text


class DataConfig(ConfigModel):
    """Problems with verifiable answers."""

    train_data_paths: FilePaths = Field(
        default=(),
        description="JSONL files with one problem per line: one path or a list. Default: generated sums.",
    )
    val_data_paths: FilePaths = Field(
        default=(), description="The same for evaluation. Default: a held-out part of the training problems."
    )
    prompt_key: Text = Field(default="prompt", description="Key of the problem text in a line.")
    answer_key: Text = Field(default="answer", description="Key of the correct answer in a line.")
    generated_digits: Annotated[Int, Field(ge=1, le=9)] = Field(
        default=1, description="Maximum digits of the numbers in generated sums, without `train_data_paths`."
    )
    max_prompt_length: Count = Field(
        default=1024, description="Maximum prompt length, in tokens; longer prompts are skipped."
    )
    rollout_batch_size: Count = Field(
        default=32, description="Prompts per training step; each is answered `algorithm.group_size` times."
    )
    shuffle: Bool = Field(default=True, description="Reshuffle the problems in every epoch.")
    seed: Seed = Field(default=0, description="Seed of that order and of generated problems.")
