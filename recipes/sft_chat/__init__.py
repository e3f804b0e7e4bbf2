"""Supervised fine-tuning of language models on conversations."""

from __future__ import annotations

from rlinf_core import Recipe

recipe = Recipe(
    name="sft_chat",
    summary="Learn from conversations, or from prompts with completions: actor workers (`recipe: sft` on"
    " JSONL or Parquet files)",
    config="recipes.sft_chat.config:ChatConfig",
    default_config="sft/sums-chat-laptop",
    program="recipes.sft_chat.chat_runner:program",
    check="recipes.sft_chat.conversations:check",
    export="recipes.language.trained_models:export_checkpoint",
    evaluate="recipes.sft_chat.chat_actor:evaluate",
    facts="recipes.language.rules.job_rules:facts",
    memory="recipes.sft_chat.chat_actor:forecast",
    inputs="recipes.language.rules.job_rules:inputs",
    convert="recipes.training.conversion.convert:convert_checkpoint",
    training_data=("data.train_data_paths",),
)
