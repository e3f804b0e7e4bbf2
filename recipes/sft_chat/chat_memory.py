"""The memory estimate of a job of recipe `sft_chat`, computed from its configuration and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from recipes.language.language_memory import gathered_parts
from recipes.language.model_sizes import model_sizes
from recipes.sft_chat.config import ChatConfig
from recipes.training.without_memory import TORCH, TRAINING, TRANSFORMERS, WORKER, shard_parts
from rlinf_core.job.recipe import ProcessForecast

# Bytes in memory per byte of a conversation file: rows as objects, and their tokens.
_READ: Final = 6


def forecast(config: ChatConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory estimate of each process of a job, see `Recipe.memory`; raises as `model_sizes` does."""
    actor, count = config.actor, world_sizes.get("actor") or 1
    model, fsdp = model_sizes(actor), actor.fsdp_config
    files = (Path(name) for name in (*config.data.train_data_paths, *config.data.val_data_paths))
    longest = config.runner.seq_length
    tokens = min(max(actor.max_tokens_per_micro_batch, longest), actor.global_batch_size * longest)
    logits = model.logits(tokens)
    parts = {
        "base": WORKER + TORCH + TRANSFORMERS + TRAINING,
        **shard_parts(model.weights, model.trained, fsdp, count, state_dtype=actor.optim.state_dtype),
        "conversations": _READ * sum(file.stat().st_size for file in files if file.is_file()),
        "activations": tokens * model.learning + logits,
    }
    parts |= gathered_parts(model, actor.model.precision, fsdp, count, parts["activations"])
    there = {part: size for part, size in parts.items() if size}
    on_accelerator = {"activations": tokens * model.learning_on_accelerator + logits}
    return [ProcessForecast("actor", count, there, 0, actor.enable_offload, (), on_accelerator)]
