"""A small model, its answers, and orders to its engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.answers.sequences import Sequence
from rlinf_core.job.load import load_job

END = 1
VOCABULARY = 40


def job_config(*overrides: str, file: str = "math/sums-laptop", sound: bool = True) -> Any:
    """Return the configuration of a shipped job, with changes; one that rules refuse is not `sound`."""
    job = load_job(file, overrides, environ={})
    if sound:
        job.raise_if_bad()
    return job.config


def tiny_model(seed: int = 0, layers: int = 2) -> Any:
    """Return a Qwen2 with two query heads for each key head; its own attention, until `use_plans`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, eos_token_id=END, pad_token_id=0)).eval()


def sequence(tokens: Iterable[int] = (5,), prompt: tuple[int, ...] = (5,), sample: int = 0, **options: Any) -> Sequence:
    """Return an answer, by default one that ended, and was drawn by weights of version 0."""
    drawn = tuple(tokens)
    known: dict[str, Any] = {"request_id": "0", "sample": sample, "prompt": prompt, "finish_reason": "stop"}
    known |= {"tokens": drawn, "logprobs": (0.0,) * len(drawn), "versions": (0,) * len(drawn)}
    return Sequence(**{**known, **options})


def answers(rng: random.Random, prompt: tuple[int, ...], lengths: list[int]) -> list[Sequence]:
    """Return random answers of these lengths to one prompt."""
    result: list[Sequence] = []
    for number, length in enumerate(lengths):
        tokens = tuple(rng.randrange(2, VOCABULARY) for _ in range(length))
        result.append(sequence(tokens, prompt, number, logprobs=tuple(-rng.random() for _ in tokens)))
    return result


def report(slot: int = 0, rewards: tuple[float, ...] = (), tokens: int = 10, **options: Any) -> GroupReport:
    """Return a report about the answers to a prompt of step 1, of two tokens each."""
    known: dict[str, Any] = {"step": 1, "problem": slot, "source": "sums", "difficulty": "", "truncated": 0}
    known |= {"lengths": (2,) * len(rewards), "failures": {}, "parts": {}, "oldest": 0, "version_sum": 0}
    return GroupReport(slot=slot, rewards=rewards, tokens=tokens, **{**known, **options})


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


class Script:
    """Orders that come when the engine has drawn so many steps: `(at, order)`, sorted."""

    def __init__(self, *orders: tuple[int, Any]) -> None:
        self.left = list(orders)
        self.now = 0

    def poll(self) -> list[Any]:
        results = [order for at, order in self.left if at <= self.now]
        self.left = [item for item in self.left if item[0] > self.now]
        self.now += 1
        return results

    def wait(self) -> Any:
        assert self.left, "waited for an order that never comes"
        self.now, order = self.left.pop(0)
        return order
