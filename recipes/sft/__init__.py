"""Supervised fine-tuning of policies on demonstrations."""

from __future__ import annotations

from typing import Final

from rlinf_core import Recipe

SOURCES: Final = ("chat", "sums")
# Rows of conversations are in these files, or have these keys; demonstrations are folders and HDF5 files.
CONVERSATIONS: Final = (
    *(f"data.train_data_paths=*.{ending}" for ending in ("jsonl", "json", "jsonl.gz", "json.gz", "parquet")),
    *(f"data.{key}=*" for key in ("messages_key", "prompt_key", "completion_key", "text_key", "loss_on")),
)

recipe = Recipe(
    name="sft",
    summary="Learn a policy from demonstrations: actor workers, and rollout and env workers to evaluate it",
    config="recipes.sft.config:SftConfig",
    default_config="sft/pick-laptop",
    program="recipes.sft.sft_program:program",
    check="recipes.sft.config:check",
    facts="recipes.embodied.config:facts",
    record="recipes.embodied.using.recording:record",
    policy="recipes.embodied.using.trained_policy:load",
    export="recipes.embodied.using.exporting:export",
    play="recipes.embodied.using.evaluation:play",
    evaluate="recipes.embodied.using.evaluation:evaluate",
    memory="recipes.sft.sft_program:forecast",
    convert="recipes.training.conversion.convert:convert_checkpoint",
    variants=dict.fromkeys((*(f"data.type={source}" for source in SOURCES), *CONVERSATIONS), "sft_chat"),
    training_data=("data.train_data_paths",),
)
