"""Supervised steps for a model that was built on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from recipes.language.batch import RolloutBatch
from recipes.language.config import LanguageConfig
from recipes.language.data.load import load_problems
from recipes.language.data.problems import training_order
from recipes.language.data.prompts import PromptEncoder
from recipes.language.packing import pack
from recipes.language.policy import LanguagePolicy
from recipes.language.sequences import Sequence as Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of a prompt and of its right answer.
Example: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def right_answers(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Return training problems with their right answers, `actor.warm_start.steps` batches of them."""
    data = config.data
    problems = load_problems(data, evaluation=False)
    encoder = PromptEncoder(tokenizer, few_shot=data.few_shot, max_prompt_length=data.max_prompt_length)
    count = config.actor.warm_start.steps * data.rollout_batch_size
    writer = cast("Any", tokenizer)
    examples: list[Example] = []
    for index in training_order(len(problems), 0, count, seed=config.actor.seed, shuffle=True):
        problem = problems[index]
        answer = writer.encode(problem.answer, add_special_tokens=False)
        examples.append((encoder.encode(problem) or (), (*answer, writer.eos_token_id)))
    return examples


def warm_start(policy: LanguagePolicy, examples: Sequence[Example], batch_size: int, lr: float) -> None:
    """Take one optimizer step (AdamW, betas 0.9 and 0.95) on every `batch_size` examples: prompt and answer tokens."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    device = next(policy.parameters()).device
    for start in range(0, len(examples) - batch_size + 1, batch_size):
        pieces = [
            RolloutBatch.of([_answer(prompt, tokens)], number, [0.0])
            for number, (prompt, tokens) in enumerate(examples[start : start + batch_size])
        ]
        loss = -policy(pack(RolloutBatch.joined(pieces), device=device)).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    # A checkpoint is only read into the state of another optimizer while no weight has a gradient.
    optimizer.zero_grad()


def _answer(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Answer:
    return Answer(
        request_id="",
        sample=0,
        prompt=prompt,
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        finish_reason="stop",
    )
