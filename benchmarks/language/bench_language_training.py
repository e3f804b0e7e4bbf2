"""Training of language models in one process: packed rows against padded ones, shared prompts, and a plain loop.

    python -m benchmarks.language.bench_language_training [--rounds N] [--only PART]

Both sides of each line take turns in one process, on one thread; figures are medians of ratios of CPU seconds, with
quarters. A model of 128 x 2 as the math recipe builds it. Gradients of both sides are compared first. Exits with 1 when
a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import Result, run_parts
from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence
from recipes.language.learning.learner import LanguageLearner, LearnerSettings, MicroBatches
from recipes.language.learning.token_targets import TokenTargets, token_advantages
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.sections.actor import OptimConfig
from recipes.training.optimizer import make_optimizer
from recipes.training.sharding import ParallelStrategy
from rlinf_core.algorithms.advantages import AdvantageSettings, grpo
from rlinf_core.algorithms.loss_inputs import LossSettings
from rlinf_core.algorithms.losses import actor

VOCABULARY = 24


def batch_of(groups: list[tuple[list[int], list[int]]], seed: int, common: int = 0) -> RolloutBatch:
    """Return random answers.

    Args:
        groups: lengths of the prompts, one for a group, and of its answers.
        seed: the seed of the tokens.
        common: tokens that all prompts begin with.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(count))

    first, pieces = tokens(common), list[RolloutBatch]()
    for number, ((prompt_length,), lengths) in enumerate(groups):
        prompt = first + tokens(prompt_length)
        answers = [
            Sequence(
                request_id="",
                sample=sample,
                prompt=prompt,
                tokens=tokens(length),
                logprobs=(-3.0,) * length,
                versions=(0,) * length,
                finish_reason="stop",
            )
            for sample, length in enumerate(lengths)
        ]
        pieces.append(RolloutBatch.of(answers, number, [float(rng.random() < 0.5) for _ in answers]))
    return RolloutBatch.joined(pieces)


def geometric(count: int, seed: int) -> RolloutBatch:
    """Return answers of geometric length, mean 60, from 8 to 256, each to its own prompt of two tokens."""
    rng = random.Random(seed)
    lengths = [min(256, max(8, int(rng.expovariate(1 / 60)))) for _ in range(count)]
    return batch_of([([2], [length - 2]) for length in lengths], seed)


def model() -> Any:
    """Return the model that the math recipe builds."""
    return built_model(built_tokenizer(), hidden_dim=128, layers=2, positions=1024)


def compare(ours: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, str]:
    """Return the median over rounds of how many times longer `other` takes, and the quarters, as text."""
    for side in (ours, other):
        side()
    ratios: list[float] = []
    for _ in range(rounds):
        spent: list[float] = []
        for side in (ours, other):
            began = time.process_time()
            side()
            spent.append(time.process_time() - began)
        ratios.append(spent[1] / spent[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, f"quarters {low:.2f} to {high:.2f}"


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of a module, and forget them there."""
    gradients = [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]
    module.zero_grad()
    return gradients


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between gradients, by the largest gradient."""
    pairs = list(zip(first, second, strict=True))
    scale = max(float(gradient.abs().max()) for gradient in first)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / scale


def packed_pass(policy: LanguagePolicy, batch: RolloutBatch, *, masks: bool, budget: int = 2048) -> None:
    """Add the gradient of the mean log-probability of all answer tokens, in packed micro-batches."""
    micro = MicroBatches(ParallelStrategy(policy, 1), torch.device("cpu"), max_tokens=budget, masks=masks)
    for rows in micro.divide(batch, list(range(len(batch)))):
        (policy(micro.pack(batch, rows)).logprobs.sum() / len(batch.trained)).backward()


def padded_pass(plain: Any, batch: RolloutBatch) -> None:
    """Add the same gradient by transformers, all sequences padded to the longest."""
    logprobs = padded_logprobs(plain, batch)
    (logprobs.sum() / len(batch.trained)).backward()


def padded_logprobs(plain: Any, batch: RolloutBatch) -> Tensor:
    """Return the log-probabilities of answer tokens, [n, longest - 1], 0 elsewhere."""
    lengths, longest = batch.lengths, int(batch.lengths.max())
    inside = torch.arange(longest)[None] < lengths[:, None]
    tokens = torch.zeros(inside.shape, dtype=torch.int64).masked_scatter(inside, batch.tokens)
    logits = plain(tokens, attention_mask=inside.long()).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    answer = inside[:, 1:] & (torch.arange(1, longest)[None] >= batch.prompt_lengths[:, None])
    return logprobs * answer


def packing(rounds: int) -> list[Result]:
    """Forward and backward pass over 128 sequences."""
    plain = model()
    policy, batch = LanguagePolicy(copy.deepcopy(plain)), geometric(128, 0)
    packed_pass(policy, batch, masks=True)
    padded_pass(plain, batch)
    error = largest_difference(gradients(policy), gradients(plain))
    ratio, spread = compare(lambda: packed_pass(policy, batch, masks=True), lambda: padded_pass(plain, batch), rounds)
    measured = f"{int(batch.lengths.sum())} tokens; {spread}; gradients differ by {error:.0e}"
    met = ratio >= 3.5 and error < 1e-5
    return [Result("tokens per cpu-s, packed against padded", measured, f"{ratio:.2f}x", ">= 3.5x", met)]


def sharing(rounds: int) -> list[Result]:
    """Forward and backward pass over 16 groups of 8, with 60 tokens that all prompts begin with."""
    rng = random.Random(1)
    batch = batch_of([([12], [rng.randrange(4, 20) for _ in range(8)]) for _ in range(16)], 1, common=60)
    policy = LanguagePolicy(model())
    packed_pass(policy, batch, masks=True)
    shared = gradients(policy)
    packed_pass(policy, batch, masks=False)
    error = largest_difference(shared, gradients(policy))
    ratio, spread = compare(
        lambda: packed_pass(policy, batch, masks=True), lambda: packed_pass(policy, batch, masks=False), rounds
    )
    measured = f"{spread}; gradients differ by {error:.0e}"
    return [Result("few-shot groups, prompts shared against not", measured, f"{ratio:.2f}x", ">= 3x", ratio >= 3)]


def plain_loop(rounds: int) -> list[Result]:
    """Whole optimizer steps, advantages included, against a loop of thirty lines."""
    results: list[Result] = []
    rng = random.Random(2)
    sums = batch_of([([5], [rng.randrange(2, 4) for _ in range(8)]) for _ in range(32)], 2)
    uneven = batch_of([([20], [min(256, max(8, int(rng.expovariate(1 / 60)))) for _ in range(8)]) for _ in range(8)], 3)
    for name, batch in (("one-digit sums, 32 x 8", sums), ("geometric lengths, 8 x 8", uneven)):
        plain = model()
        policy = LanguagePolicy(copy.deepcopy(plain))
        strategy = ParallelStrategy(policy, 1)
        settings, cpu = LearnerSettings(), torch.device("cpu")
        learner = LanguageLearner(
            policy,
            strategy,
            make_optimizer(policy, OptimConfig()),
            actor,
            LossSettings(),
            settings,
            cpu,
        )
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

        def ours(batch: RolloutBatch = batch, learner: LanguageLearner = learner) -> None:
            advantages, _ = token_advantages(batch, grpo, AdvantageSettings(group_size=8))
            learner.train(batch, TokenTargets(advantages=advantages, old_logprobs=batch.logprobs), 0)

        def loop(batch: RolloutBatch = batch, plain: Any = plain, optimizer: Any = optimizer) -> None:
            plain_step(plain, optimizer, batch, 8)

        ratio, spread = compare(ours, loop, rounds)
        results.append(
            Result(
                f"optimizer steps per cpu-s, {name}",
                f"against a plain loop; {spread}",
                f"{ratio:.2f}x",
                ">= 0.9x",
                ratio >= 0.9,
            )
        )
    return results


def plain_step(plain: Any, optimizer: torch.optim.Optimizer, batch: RolloutBatch, group_size: int) -> None:
    """Take one step of GRPO on a padded batch."""
    scores = batch.rewards.view(-1, group_size)
    relative = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()[:, None]
    logprobs = padded_logprobs(plain, batch)
    answer = logprobs != 0
    old = torch.zeros_like(logprobs).masked_scatter(answer, batch.logprobs)
    ratio = (logprobs - old).exp()
    losses = torch.maximum(-relative * ratio, -relative * ratio.clamp(0.8, 1.2))
    loss = (losses * answer).sum() / answer.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()


def main() -> int:
    parts: dict[str, Callable[[int], list[Result]]] = {"packing": packing, "sharing": sharing, "loop": plain_loop}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often both sides take turns (default: 9)")
    parser.add_argument("--only", choices=list(parts))
    args = parser.parse_args()
    torch.set_num_threads(1)
    return run_parts({name: partial(part, args.rounds) for name, part in parts.items()}, args.only)


if __name__ == "__main__":
    sys.exit(main())
