"""A small model and answers for tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence

END = 1
VOCABULARY = 40


def tiny_model(seed: int = 0, layers: int = 2) -> Any:
    """Return a Qwen2 with two query heads for each key head; its own attention, until `use_plans`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=END,
            pad_token_id=0,
        )
    ).eval()


def answers(rng: random.Random, prompt: tuple[int, ...], lengths: list[int]) -> list[Sequence]:
    """Return random answers of these lengths to one prompt."""
    result: list[Sequence] = []
    for number, length in enumerate(lengths):
        tokens = tuple(rng.randrange(2, VOCABULARY) for _ in range(length))
        result.append(
            Sequence(
                request_id="0",
                sample=number,
                prompt=prompt,
                tokens=tokens,
                logprobs=tuple(-rng.random() for _ in tokens),
                versions=(0,) * length,
                finish_reason="stop",
            )
        )
    return result


def random_batch(
    seed: int, groups: int = 5, size: int = 3, common: int = 0, longest: int = 9, reward: Callable[[int], float] = float
) -> RolloutBatch:
    """Return groups of random answers; all prompts begin with `common` equal tokens."""
    rng = random.Random(seed)
    first = tuple(rng.randrange(2, VOCABULARY) for _ in range(common))
    batches: list[RolloutBatch] = []
    for group in range(groups):
        prompt = first + tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, longest)))
        lengths = [rng.randrange(1, longest) for _ in range(size)]
        batches.append(RolloutBatch.of(answers(rng, prompt, lengths), group, [reward(i % 2) for i in range(size)]))
    return RolloutBatch.joined(batches)


def plain_logprobs(model: Any, batch: RolloutBatch) -> Tensor:
    """Return the log-probability of each answer token, one sequence at a time, by transformers alone."""
    pieces: list[Tensor] = []
    start = 0
    for length, prompt in zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True):
        row = batch.tokens[start : start + length][None]
        logits = model(row).logits[0, prompt - 1 : length - 1].log_softmax(-1)
        pieces.append(logits.gather(1, row[0, prompt:, None])[:, 0])
        start += length
    return torch.cat(pieces)
