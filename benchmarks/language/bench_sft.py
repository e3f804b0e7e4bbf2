"""Packed fine-tuning against padded batches, in one run: a plain loop over transformers, and TRL where it is installed.

    python benchmarks/language/bench_sft.py [--quick]

Both sides take the same optimizer steps on the same batches of the same examples, whose lengths are geometric, on one
thread. Figures are tokens per CPU second; rounds of the sides take turns, and each line is the ratio of medians. Losses
of all steps have to be equal. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from benchmarks.table import Result, run_parts
from recipes.language.models.policy import LanguagePolicy
from recipes.sft_chat.examples import ChatExample, micro_batches, pack_examples

VOCABULARY, SHORTEST, LONGEST, MEAN = 512, 8, 256, 60
BATCH, RATE, CLIP, BUDGET = 32, 1e-3, 1.0, 2048
# Largest difference of a loss.
SAME: Final = 1e-4
# Losses of the steps, and CPU seconds.
Trained = tuple[list[float], float]


def tiny() -> Any:
    """Return a Qwen2 of 128 numbers and 2 layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def geometric(count: int) -> list[ChatExample]:
    """Return examples of random tokens; a third of each is the prompt."""
    rng = random.Random(0)
    made: list[ChatExample] = []
    for _ in range(count):
        length = min(LONGEST, SHORTEST + int(rng.expovariate(1 / (MEAN - SHORTEST))))
        tokens = [rng.randrange(2, VOCABULARY) for _ in range(length)]
        made.append(ChatExample.of(tokens, [place >= length // 3 for place in range(length)]))
    return made


def batches(examples: Sequence[ChatExample]) -> list[Sequence[ChatExample]]:
    """Return the batches of all optimizer steps."""
    return [examples[start : start + BATCH] for start in range(0, len(examples), BATCH)]


def steps(model: torch.nn.Module, parts: Sequence[Any], loss_of: Callable[[Any], float]) -> Trained:
    """Take an optimizer step on each part; `loss_of` computes its loss and the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    began, losses = time.process_time(), list[float]()
    for part in parts:
        optimizer.zero_grad()
        losses.append(loss_of(part))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return losses, time.process_time() - began


def packed(model: Any, examples: Sequence[ChatExample]) -> Trained:
    """Train as recipe `sft_chat` does."""
    policy = LanguagePolicy(model)

    def loss_of(batch: Sequence[ChatExample]) -> float:
        targets, total = sum(int(example.trained.sum()) for example in batch), 0.0
        lengths = [len(example.tokens) for example in batch]
        for part in micro_batches(lengths, range(len(batch)), 1, 0, BUDGET, masks=True):
            loss = -policy(pack_examples([batch[number] for number in part])).logprobs.sum() / targets
            loss.backward()
            total += float(loss.detach())
        return total

    return steps(model, batches(examples), loss_of)


def padded(model: Any, examples: Sequence[ChatExample]) -> Trained:
    """Train on batches that are padded to their longest example."""

    def loss_of(batch: Sequence[ChatExample]) -> float:
        longest = max(len(example.tokens) for example in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for row, example in enumerate(batch):
            count = len(example.tokens)
            tokens[row, :count], mask[row, :count] = example.tokens.long(), 1
            labels[row, :count] = torch.where(example.trained, example.tokens.long(), -100)
        logits = model(input_ids=tokens, attention_mask=mask).logits
        loss = cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        loss.backward()
        return float(loss.detach())

    return steps(model, batches(examples), loss_of)


def by_trl(model: Any, examples: Sequence[ChatExample]) -> Trained:
    """Train by TRL's SFTTrainer, with what it needs to take the same steps."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from recipes.language.models.load_model import built_tokenizer

    rows = [
        {"input_ids": example.tokens.tolist(), "completion_mask": [int(value) for value in example.trained]}
        for example in examples
    ]
    losses: list[float] = []

    class Trainer(SFTTrainer):
        """Keeps the loss of each step in full."""

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            """Return the loss."""
            result = super().compute_loss(*args, **options)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=BATCH,
                num_train_epochs=1,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=CLIP,
                max_length=None,
                completion_only_loss=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                train_sampling_strategy="sequential",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=built_tokenizer(),
        )
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
    return losses, seconds


def compare(name: str, other: Callable[[Any, Sequence[ChatExample]], Trained], rounds: int, goal: float) -> Result:
    """Return the line of one comparison."""
    examples, model = geometric(8 * BATCH), tiny()
    tokens = sum(len(example.tokens) for example in examples)
    ours, theirs, gap = list[float](), list[float](), 0.0
    for number in range(rounds + 1):
        losses, seconds = packed(copy.deepcopy(model), examples)
        others, other_seconds = other(copy.deepcopy(model), examples)
        gap = max(gap, max(abs(one - two) for one, two in zip(losses, others, strict=True)))
        if number:  # the first round warms up
            ours.append(tokens / seconds)
            theirs.append(tokens / other_seconds)
    ratio = statistics.median(ours) / statistics.median(theirs)
    measured = (
        f"{statistics.median(ours):,.0f} against {statistics.median(theirs):,.0f} tokens per CPU second;"
        f" losses of {len(examples) // BATCH} steps within {gap:.1g}"
    )
    return Result(name, measured, f"{ratio:.2f} x", f">= {goal:g} x", ratio >= goal and gap <= SAME)


def main() -> int:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description="packed fine-tuning against padded batches")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 1 if parser.parse_args().quick else 5
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[Result]]] = {
        "loop": lambda: [compare("packed against a loop over padded batches", padded, rounds, 2.0)]
    }
    if find_spec("trl") is not None:
        parts["trl"] = lambda: [compare("packed against TRL's SFTTrainer", by_trl, rounds, 3.0)]
    else:
        print("TRL is not installed: its comparison is left out", file=sys.stderr)
    return run_parts(parts, None)


if __name__ == "__main__":
    sys.exit(main())
