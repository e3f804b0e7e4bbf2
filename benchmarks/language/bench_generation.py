"""Our generation engine against transformers, in one run: uneven and equal lengths, shared prefixes, weight sync.

    python -m benchmarks.language.bench_generation [--quick] [--only lengths|equal|prefix|memory|weights]
        [--model FOLDER]

Figures of generation are tokens per CPU second, on one thread; those of weights are seconds against a copy of as many
bytes in memory. Rounds of both sides take turns; each line is the ratio of medians, with the quarters of single ratios.
`--model` also decodes with a real model, such as that of `python -m recipes.language.models.smollm2`. Exits with 1 when
a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.table import Result, run_parts
from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.weights.weight_transfer import IncomingWeights, messages
from recipes.training.weights.weight_sync import FlatWeights, WeightSender
from rlinf_core import Cluster, NodePlacementStrategy, Worker

MB = 1 << 20
VOCABULARY, PROMPT, SHORTEST, LONGEST, MEAN = 64, 16, 8, 256, 60
Tokens = tuple[int, ...]


def tiny(positions: int = 1024) -> Any:
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
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def geometric(count: int, seed: int = 0) -> list[int]:
    """Return lengths of answers: most are short, few are long."""
    rng = random.Random(seed)
    return [min(LONGEST, max(SHORTEST, int(rng.expovariate(1 / MEAN)))) for _ in range(count)]


def prompts(count: int, vocabulary: int, common: int = 0, own: int = PROMPT) -> list[Tokens]:
    """Return random prompts, the first `common` tokens of which are equal."""
    rng = random.Random(1)
    first = tuple(rng.randrange(2, vocabulary) for _ in range(common))
    return [first + tuple(rng.randrange(2, vocabulary) for _ in range(own)) for _ in range(count)]


# What decodes


def ours(model: Any, asked: Sequence[Tokens], lengths: Sequence[int], *, share: bool = True) -> int:
    """Answer by our engine; return how many tokens were drawn."""
    engine = TorchEngine(model, share_prefixes=share)
    for index, (prompt, length) in enumerate(zip(asked, lengths, strict=True)):
        engine.submit(Request(request_id=str(index), prompt=prompt, params=SamplingParams(max_new_tokens=length)))
    return sum(len(result.tokens) for result in engine.results())


def padded(model: Any, asked: Sequence[Tokens], lengths: Sequence[int]) -> int:
    """Answer by `generate` in one batch, which continues until its longest answer ends."""
    longest = max(lengths)
    row = torch.tensor(asked)
    with torch.inference_mode():
        model.generate(
            row,
            attention_mask=torch.ones_like(row),
            do_sample=True,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
        )
    return sum(lengths)


def continuous(model: Any, asked: Sequence[Tokens], lengths: Sequence[int]) -> int:
    """Answer by transformers' continuous batching."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LONGEST, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=2048, max_batch_tokens=512, return_logprobs=True)
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching)
    manager.start()
    drawn = 0
    try:
        for index, (prompt, length) in enumerate(zip(asked, lengths, strict=True)):
            manager.add_request(list(prompt), request_id=str(index), max_new_tokens=length)
        left = len(asked)
        while left:
            result = manager.get_result(timeout=60)
            if result is None:
                raise TimeoutError("continuous batching gave no answer for a minute")
            if result.is_finished():
                drawn, left = drawn + len(result.generated_tokens), left - 1
    finally:
        manager.stop(block=True)
    return drawn


def speeds(rounds: int, *sides: Callable[[], int]) -> list[list[float]]:
    """Return tokens per CPU second of each side, round by round; a first round does not count."""
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for index, side in enumerate(sides):
            begun = time.process_time()
            tokens = side()
            if number:
                rates[index].append(tokens / (time.process_time() - begun))
    return rates


def line(what: str, mine: Sequence[float], theirs: Sequence[float], goal: float) -> Result:
    """Return the ratio of two speeds as a line."""
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    ratio = statistics.median(mine) / statistics.median(theirs)
    measured = (
        f"{statistics.median(mine):,.0f} against {statistics.median(theirs):,.0f} tokens per cpu-s, quarters"
        f" {low:.2f} to {high:.2f}"
    )
    return Result(what, measured, f"{ratio:.2f}x", f">= {goal:g}x", ratio >= goal)


def uneven(rounds: int) -> list[Result]:
    """256 answers of geometric lengths."""
    model, plain, batched = tiny(), tiny(), tiny()
    lengths = geometric(256)
    asked = prompts(256, VOCABULARY)
    mine, one, other = speeds(
        rounds,
        lambda: ours(model, asked, lengths),
        lambda: padded(plain, asked, lengths),
        lambda: continuous(batched, asked, lengths),
    )
    return [
        line("geometric lengths, against continuous batching", mine, other, 3),
        line("geometric lengths, against one padded batch", mine, one, 4),
    ]


def equal(rounds: int) -> list[Result]:
    """Answers of one length, where nobody leaves the batch."""
    lines: list[Result] = []
    for rows, length in ((8, 128), (64, 64), (256, 32)):
        model, plain = tiny(), tiny()
        asked, lengths = prompts(rows, VOCABULARY), [length] * rows
        mine, theirs = speeds(
            5 * rounds,  # each takes a fraction of a second, and single ones differ by a tenth
            lambda: ours(model, asked, lengths),  # noqa: B023 - called in this round
            lambda: padded(plain, asked, lengths),  # noqa: B023
        )
        lines.append(line(f"{rows} answers of {length} tokens, against generate", mine, theirs, 0.95))
    return lines


def prefix(rounds: int) -> list[Result]:
    """Short answers to questions after the same examples."""
    model = tiny()
    asked, lengths = prompts(64, VOCABULARY, common=400, own=12), [8] * 64
    mine, theirs = speeds(rounds, lambda: ours(model, asked, lengths), lambda: ours(model, asked, lengths, share=False))
    return [line("few-shot prefix of 400 tokens, shared against not", mine, theirs, 3)]


def memory() -> list[Result]:
    """Keys and values of a long prompt, against what its tokens need: with many answers, and beside short prompts."""
    model = tiny(8192)
    [long], short = prompts(1, VOCABULARY, own=6000), prompts(64, VOCABULARY, own=20)
    return [
        kept("prompt of 6,000, 64 answers of 20: keys and values", model, [(long, 64)]),
        kept("prompt of 6,000 beside 64 of 20, answers of 20", model, [(prompt, 1) for prompt in (long, *short)]),
    ]


def kept(what: str, model: Any, asked: Sequence[tuple[Tokens, int]]) -> Result:
    """Return the most memory of keys and values while prompts get answers of 20 tokens, as a line."""
    engine = TorchEngine(model)
    for index, (prompt, count) in enumerate(asked):
        params = SamplingParams(max_new_tokens=20)
        engine.submit(Request(request_id=str(index), prompt=prompt, params=params, group_size=count))
    config = model.config
    token = 2 * 4 * config.num_hidden_layers * config.hidden_size // config.num_attention_heads
    needed = token * config.num_key_value_heads * sum(len(prompt) + 20 * count for prompt, count in asked)
    most = 0
    while engine.unfinished:
        engine.step()
        most = max(most, engine.stats().cache_bytes)
    ratio = most / needed
    return Result(what, f"{most / MB:.1f} of {needed / MB:.1f} MB needed", f"{ratio:.2f}x", "<= 3x", ratio <= 3)


def real(rounds: int, folder: str) -> list[Result]:
    """Measure a real model: uneven lengths, equal ones, and a few-shot prefix."""
    from recipes.language.models.load_model import load_model

    model = load_model(folder)
    plain = copy.deepcopy(model)
    words = model.config.vocab_size
    asked, lengths = prompts(24, words), [min(128, length) for length in geometric(24)]
    mine, theirs = speeds(rounds, lambda: ours(model, asked, lengths), lambda: padded(plain, asked, lengths))
    lines = [line("real model, geometric lengths, against one padded batch", mine, theirs, 1)]
    asked, lengths = prompts(16, words), [32] * 16
    mine, theirs = speeds(rounds, lambda: ours(model, asked, lengths), lambda: padded(plain, asked, lengths))
    lines.append(line("real model, 16 answers of 32 tokens, against generate", mine, theirs, 0.95))
    asked, lengths = prompts(16, words, common=80, own=8), [6] * 16
    mine, theirs = speeds(rounds, lambda: ours(model, asked, lengths), lambda: ours(model, asked, lengths, share=False))
    return [*lines, line("real model, few-shot prefix of 80 tokens, shared against not", mine, theirs, 3)]


# Weights


def of_135_million() -> Any:
    """Return a Llama of the shapes of SmolLM2-135M, with fresh weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    ).eval()


class Sender(Worker):
    """Stands for the actor: sends weights as it does."""

    def warm(self) -> None:
        torch.set_num_threads(1)
        self.weights = FlatWeights.adopt(of_135_million())
        self.sender = WeightSender(self, ("senders", 0), "receivers", range(1), in_background=False)

    def give(self, version: int) -> float:
        begun = time.perf_counter()
        self.sender.send(messages(self.weights, version))
        return time.perf_counter() - begun

    def copy(self) -> float:
        source = self.weights.buffers[0]
        target = torch.ones_like(source)
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun


class Receiver(Worker):
    """Stands for a rollout worker with our engine."""

    def warm(self) -> None:
        torch.set_num_threads(1)
        self.engine = TorchEngine(of_135_million())

    def take(self) -> float:
        begun = time.perf_counter()
        groups, sender = [("receivers", [0])], ("senders", 0)
        incoming = IncomingWeights(lambda: self.broadcast(None, groups, sender, async_op=True), may_keep=True)
        incoming.wait().apply(self.engine)
        return time.perf_counter() - begun


def weights(rounds: int) -> list[Result]:
    """All weights of a model of 135 M parameters from an actor into a running engine; and the size of an adapter."""
    ratios: list[float] = []
    with Cluster(num_nodes=1) as cluster:
        senders = Sender.create_group().launch(cluster, NodePlacementStrategy([0]), name="senders")
        receivers = Receiver.create_group().launch(cluster, NodePlacementStrategy([0]), name="receivers")
        senders.warm().wait()
        receivers.warm().wait()
        for number in range(rounds + 2):
            copied = senders.copy().wait()[0]
            taking, giving = receivers.take(), senders.give(number)
            seconds = max(*taking.wait(), *giving.wait())
            if number >= 2:
                ratios.append(seconds / copied)
    middle = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    measured = f"quarters {low:.2f} to {high:.2f}; with fingerprints on both sides"
    return [
        Result("sync of 135 M parameters, against memcpy", measured, f"{middle:.2f}x", "<= 2x", middle <= 2),
        *map(adapter, (8, 16)),
    ]


def adapter(rank: int) -> Result:
    """Return the bytes of a LoRA adapter of all linear layers as a share of those of the model."""
    from recipes.sections.actor import LoraSettings
    from recipes.training.huggingface import with_lora

    model = of_135_million()
    whole = sum(weight.numel() for weight in model.parameters())
    tuned = with_lora(model, LoraSettings(rank=rank))
    part = sum(weight.numel() for name, weight in tuned.named_parameters() if ".lora_" in name)
    share = part / whole
    measured = f"{4 * part / MB:.1f} of {4 * whole / MB:.0f} MB in float32"
    return Result(f"LoRA adapter of rank {rank}, bytes sent", measured, f"{share:.1%}", "<= 3%", share <= 0.03)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", choices=["lengths", "equal", "prefix", "memory", "weights", "real"])
    parser.add_argument("--model", default="", help="folder of a real model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if args.quick else 3
    parts: dict[str, Callable[[], list[Result]]] = {
        "lengths": lambda: uneven(rounds),
        "equal": lambda: equal(rounds),
        "prefix": lambda: prefix(rounds),
        "memory": memory,
        "weights": lambda: weights(5 if args.quick else 11),
    }
    if args.model:
        parts["real"] = lambda: real(min(rounds, 3), args.model)
    return run_parts(parts, args.only)


if __name__ == "__main__":
    sys.exit(main())
