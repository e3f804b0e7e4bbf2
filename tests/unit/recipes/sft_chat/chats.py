"""Tokenizers, files and workers of tests about conversations."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from recipes.language.models.load_model import built_tokenizer
from recipes.sft_chat.chat_actor import ChatActor
from recipes.sft_chat.config import ChatActorConfig, ChatConfig
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread

WORDS = ("<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>")
PLAIN = str(ChatActorConfig.built_template)
# Drops the thoughts of all turns of the assistant but the last message.
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(template: str | None = PLAIN) -> Any:
    """Return a tokenizer of printable characters."""
    return built_tokenizer(string.printable, WORDS, template)


def turns(*texts: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def jsonl(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows, and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(*overrides: str) -> ChatConfig:
    """Return the shipped configuration of a small model, with changes."""
    small = ("actor.model.hidden_dim=32", "actor.model.num_layers=1", "data.train_size=40", "actor.global_batch_size=8")
    job = load_job("sft/sums-chat-laptop", (*small, *overrides), environ={})
    job.raise_if_bad()
    return cast("ChatConfig", job.config)


def actor_of(*overrides: str) -> Any:
    """Return a worker that has read its conversations and built its model."""
    config = config_of(*overrides)
    actor = in_thread(ChatActor, config.actor.group_name, Hub(), 0, 1)(config)
    actor.warnings = []
    actor.log_warning = lambda message, *args: actor.warnings.append(message % args)
    actor.counts = actor.init_worker()
    return actor
