"""Training passes, generation and memory on a GPU, each against the usual way, in one run.

    python -m benchmarks.language.on_gpu [--only training|generation|memory] [--quick]

A Qwen2 of half a billion weights with random values in bfloat16. Each line is the ratio of medians of rounds in which
the sides take turns, with the quarters of single ratios. Lines of memory are the forecast divided by the peak of
torch's allocator. Exits with 1 when a goal is missed, and with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import Result, run_parts
from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.language_memory import Sizes, component_forecasts
from recipes.language.learning.learner import LanguageLearner, LearnerSettings
from recipes.language.learning.token_targets import TokenTargets
from recipes.language.learning.warm_start import begin_training
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.packing import pack
from recipes.language.models.policy import LanguagePolicy, checkpoint_decoder
from rlinf_core import LossSettings
from rlinf_core.algorithms.options import get_policy_loss
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import DEVICE_PARTS
from rlinf_core.runners.storage.first_contact import FirstContact

VOCABULARY, HEADS, GROUPS, DIM = 64_000, 14, 2, 64
MB = 1 << 20


def model(**changed: Any) -> Any:
    """Return a Qwen2 of 0.5 B in bfloat16 on the GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HEADS * DIM, "intermediate_size": 4864, "num_hidden_layers": 24, **changed}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def lengths_of(count: int, mean: int, longest: int) -> list[int]:
    """Return lengths of answers: most are short, few are long."""
    rng = random.Random(count)
    return [min(longest, max(16, int(rng.expovariate(1 / mean)))) for _ in range(count)]


def seconds(rounds: int, *sides: Callable[[], object], skipped: int = 1) -> tuple[list[list[float]], list[int]]:
    """Return the seconds of each side, round by round, and the most bytes that each took besides what was there."""
    spent: list[list[float]] = [[] for _ in sides]
    peaks = [0] * len(sides)
    for number in range(rounds + skipped):
        for index, side in enumerate(sides):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            side()
            torch.cuda.synchronize()
            if number >= skipped:
                spent[index].append(time.perf_counter() - begun)
                peaks[index] = torch.cuda.max_memory_allocated() - before
    return spent, peaks


def line(what: str, mine: Sequence[float], theirs: Sequence[float], goal: float, note: str) -> Result:
    """Return how many times longer theirs takes."""
    ratios = [other / one for one, other in zip(mine, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    ratio = statistics.median(theirs) / statistics.median(mine)
    times = f"{1e3 * statistics.median(mine):.1f} against {1e3 * statistics.median(theirs):.1f} ms"
    measured = f"{times}, quarters {low:.2f} to {high:.2f}; {note}"
    return Result(what, measured, f"{ratio:.2f}x", f">= {goal:g}x", ratio >= goal)


def relative(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference by that of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


# Training passes


def answers(
    prompts: int, count: int, mean: int, longest: int, prompt_length: int = 256, vocabulary: int = VOCABULARY
) -> RolloutBatch:
    """Return answers of unlike lengths to random prompts."""
    rng = random.Random(0)
    lengths = iter(lengths_of(prompts * count, mean, longest))
    pieces: list[RolloutBatch] = []
    for number in range(prompts):
        prompt = tuple(rng.randrange(1, vocabulary) for _ in range(prompt_length))
        group: list[Answer] = []
        for sample in range(count):
            tokens = tuple(rng.randrange(1, vocabulary) for _ in range(next(lengths)))
            group.append(
                Answer(
                    request_id="",
                    sample=sample,
                    prompt=prompt,
                    tokens=tokens,
                    logprobs=(-3.0,) * len(tokens),
                    versions=(0,) * len(tokens),
                    finish_reason="stop",
                )
            )
        pieces.append(RolloutBatch.of(group, number, [1.0] * count))
    return RolloutBatch.joined(pieces)


def packed_pass(policy: LanguagePolicy, batch: RolloutBatch, *, masks: bool) -> Tensor:
    """Add the gradient of the mean log-probability of all answer tokens, in packed rows."""
    evaluated = policy(pack(batch, masks=masks, device="cuda"))
    evaluated.logprobs.mean().backward()
    return evaluated.logprobs.detach()


def padded_pass(plain: Any, batch: RolloutBatch, rows: int) -> Tensor:
    """Do the same for padded rows, a micro-batch of that many at a time, as transformers computes them."""
    total = len(batch.logprobs)
    sequences = list(batch.tokens.split(batch.lengths.tolist()))
    results: list[Tensor] = []
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).cuda()
        lengths = batch.lengths[start : start + rows]
        mask = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        logits = plain(input_ids=tokens, attention_mask=mask.cuda(), use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        prompts = batch.prompt_lengths[start : start + rows]
        columns = torch.arange(1, tokens.shape[1])[None]
        answer = ((columns >= prompts[:, None]) & mask[:, 1:]).cuda()
        results.append(logprobs[answer].detach())
        (logprobs[answer].sum() / total).backward()
    return torch.cat(results)


def training(rounds: int) -> list[Result]:
    """Compare forward and backward passes of a whole model."""
    batch = answers(8, 8, 256, 1024)
    count = int(batch.lengths.sum())
    lines: list[Result] = []
    ours, plain = LanguagePolicy(model()), model()
    plain.set_attn_implementation("sdpa")
    for policy in (ours.causal, plain):
        policy.train()
        policy.gradient_checkpointing_enable({"use_reentrant": False}) if policy is plain else None
    checkpoint_decoder(ours)
    mine, theirs = packed_pass(ours, batch, masks=True), padded_pass(plain, batch, 8)
    gradients = [
        torch.cat([weight.grad.flatten() for weight in one.parameters() if weight.grad is not None])
        for one in (ours.causal, plain)
    ]
    error, gap = relative(*gradients), float((mine - theirs).abs().mean())
    for one in (ours.causal, plain):
        one.zero_grad()
    for masks in (True, False):
        spent, peaks = seconds(
            rounds, partial(packed_pass, ours, batch, masks=masks), partial(padded_pass, plain, batch, 8)
        )
        note = (
            f"{count / statistics.median(spent[0]):,.0f} against {count / statistics.median(spent[1]):,.0f} tokens/s;"
        )
        note += f" {peaks[0] // MB} against {peaks[1] // MB} MiB; gradients differ by {error:.1e}, log-probs {gap:.1e}"
        what = "shared prompts" if masks else "rows without a mask"
        lines.append(line(f"training pass, {what}, against padded rows (sdpa)", spent[0], spent[1], 1.5, note))
    return lines


# Generation


def generated(made: Any, asked: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int:
    """Answer by our engine; return how many tokens were drawn."""
    engine = TorchEngine(made)
    for index, (prompt, length) in enumerate(zip(asked, lengths, strict=True)):
        engine.submit(Request(request_id=str(index), prompt=prompt, params=SamplingParams(max_new_tokens=length)))
    return sum(len(result.tokens) for result in engine.results())


def padded_batch(made: Any, asked: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int:
    """Answer by `generate` in one batch, which continues until its longest answer ends."""
    row = torch.tensor(asked, device="cuda")
    with torch.inference_mode():
        made.generate(
            row,
            attention_mask=torch.ones_like(row),
            do_sample=True,
            top_k=0,
            min_new_tokens=max(lengths),
            max_new_tokens=max(lengths),
        )
    return sum(lengths)


def generation(rounds: int) -> Iterator[Result]:
    """Compare the generation of answers of unlike lengths."""
    made, plain = model(), model()
    rng = random.Random(1)
    for count, longest in ((16, 128), (128, 256)):
        asked = [tuple(rng.randrange(1, VOCABULARY) for _ in range(128)) for _ in range(count)]
        lengths = lengths_of(count, longest // 3, longest)
        spent, peaks = seconds(
            rounds, partial(generated, made, asked, lengths), partial(padded_batch, plain, asked, lengths)
        )
        speeds = " against ".join(f"{sum(lengths) / statistics.median(side):,.0f}" for side in spent)
        note = f"{speeds} tokens/s; {', '.join(str(peak // MB) for peak in peaks)} MiB"
        yield line(f"{count} answers of up to {longest}: against generate", spent[0], spent[1], 2, note)


# Memory


def memory(_: int) -> Iterator[Result]:
    """Compare the forecast with what a step of training takes of the GPU."""
    small = "actor.model={hidden_dim: 1024, num_layers: 12, precision: fp32}"
    for what, changes in {
        "float32": (small,),
        "float32, checkpointing": (small, "actor.fsdp_config.gradient_checkpointing=true"),
        "bfloat16": (small.replace("fp32", "bf16"),),
        "bfloat16, LoRA": (small.replace("fp32", "bf16"), "actor.model.lora={rank: 16, alpha: 32}"),
    }.items():
        forecasts, measured = in_phases(changes)
        for phase, size in measured.items():
            ratio = forecasts[phase] / size
            amounts = f"{forecasts[phase] // MB} MiB forecast, {size // MB} MiB measured"
            yield Result(f"memory, {what}, {phase}", amounts, f"{ratio:.2f}x", "0.85 to 1.15", abs(ratio - 1) <= 0.15)


def in_phases(changes: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the forecast and the measured bytes on the GPU, of weights alone and of a step."""
    overrides = (
        *changes,
        "actor.warm_start.steps=0",
        "runner.seq_length=1024",
        "rollout.sampling_params.max_new_tokens=1000",
        "data.rollout_batch_size=8",
        "actor.max_tokens_per_micro_batch=16384",
        "algorithm.n_minibatches=1",
        "algorithm.entropy_bonus=0.001",
    )
    job = load_job("math/sums-laptop", overrides, environ={})
    if job.config is None:
        problems = "; ".join(diagnostic.message for diagnostic in job.diagnostics)
        raise SystemExit(
            f"error: math/sums-laptop cannot be read: {problems} (recipes are there once rlinf-cli is installed)"
        )
    config: Any = job.config
    sizes = Sizes.of(config, {"actor": 1, "rollout": 1, "reward": 1})
    parts = component_forecasts(sizes)[0].parts_of(accelerated=True)
    expected = {"weights": parts["weights"], "step": sum(parts.get(name, 0) for name in DEVICE_PARTS)}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    policy, state = begin_training(
        config,
        make_tokenizer(config.actor),
        FirstContact(skips=True),
        device=torch.device("cuda"),
        rank=0,
        world_size=1,
        is_sent=lambda name: True,
    )
    measured = {"weights": torch.cuda.memory_allocated() - before}
    learner = LanguageLearner(
        policy,
        state.strategy,
        state.optimizer,
        get_policy_loss("actor"),
        replace(LossSettings(), entropy_bonus=0.001),
        LearnerSettings(max_tokens=config.actor.max_tokens_per_micro_batch),
        torch.device("cuda"),
    )
    state.apply_settings(1, None)
    batch = answers(8, 8, 10**9, 1000, prompt_length=24, vocabulary=20)
    targets = TokenTargets(advantages=torch.ones_like(batch.logprobs), old_logprobs=batch.logprobs)
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        learner.train(batch, targets, step)
    measured["step"] = torch.cuda.max_memory_allocated() - before
    return expected, measured


PARTS: dict[str, Callable[[int], Iterable[Result]]] = {
    "training": training,
    "generation": generation,
    "memory": memory,
}


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU that torch can use", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    # Shards of one rank, in which a model with another type of computation is kept.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    rounds = 3 if arguments.quick else 9
    return run_parts({name: partial(part, rounds) for name, part in PARTS.items()}, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
