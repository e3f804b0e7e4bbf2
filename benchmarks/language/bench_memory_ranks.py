"""Peak memory of each rank that trains a language model together with others, by phase, at 1, 2 and 4 ranks.

    python benchmarks/language/bench_memory_ranks.py [--ranks 1 2 4] [--width 1024] [--layers 24] [--json FILE]

A model of that size is written to a temporary folder. Ranks (gloo, one thread each) load it as actors do, send its
weights, take two optimizer steps of a micro-batch for each of four prompts, write a checkpoint, and export the model.
A peak is the largest resident set of a phase (VmHWM, which Linux resets), over ranks, less what the process has after
its imports. The fit is peak(n) = a + b / n by least squares, with b beside what a rank's share counts: weights,
gradients and two moments in float32. What is lost, learned and sent has to be equal for any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.ranks import Phases, fitted, run_ranks

RANKS: Final = (1, 2, 4)
_MIB: Final = 2**20
# Numbers of a parameter that training holds: itself, its gradient, two moments.
_TRAINED: Final = 4
# Packed tokens of a pass.
_TOKENS: Final = 24
# Largest relative difference of the losses and the norms of gradients of two steps, for any number of ranks.
_NEAR: Final = 1e-5


def write_model(folder: Path, width: int, layers: int) -> int:
    """Write a Qwen2 with random weights and a tokenizer into a folder, and return the number of its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.language.models.load_model import built_tokenizer

    tokenizer: Any = built_tokenizer()
    torch.random.default_generator.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return sum(weight.numel() for weight in model.parameters())


def take_part(rank: int, count: int, model: Path, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Load, send, train, save and export as one of `count` ranks, and return what is to be compared."""
    import torch
    import torch.distributed as dist

    # What a worker has imported before it holds anything.
    for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"):
        import_module(name)
    import_module("transformers.models.qwen2.modeling_qwen2")

    from recipes.language.learning.learner import LanguageLearner, LearnerSettings
    from recipes.language.learning.token_targets import TokenTargets
    from recipes.language.learning.warm_start import begin_training
    from recipes.language.models.load_model import make_tokenizer
    from recipes.language.weights.model_export import export
    from recipes.language.weights.weight_transfer import messages
    from rlinf_core import LossSettings
    from rlinf_core.algorithms.options import get_policy_loss
    from rlinf_core.job.load import load_job
    from rlinf_core.runners.storage.first_contact import FirstContact

    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    overrides = [f"actor.model.model_path={model}", "actor.warm_start.steps=0", *settings]
    config: Any = load_job("math/sums-laptop", overrides, environ={}).config
    actor, tokenizer, host = config.actor, make_tokenizer(config.actor), torch.device("cpu")
    phases = Phases()
    with phases.phase("load"):
        policy, state = begin_training(
            config,
            tokenizer,
            FirstContact(),
            device=host,
            rank=rank,
            world_size=count,
            is_sent=lambda name: True,
        )
    with phases.phase("sync"):
        first = _last(messages(state.sent_weights(), 0, prefix="model."))
    learner = LanguageLearner(
        policy,
        state.strategy,
        state.optimizer,
        get_policy_loss("actor"),
        LossSettings(),
        LearnerSettings(max_tokens=_TOKENS),
        host,
    )
    state.apply_settings(1, None)
    vocabulary = int(policy.causal.config.vocab_size)
    steps: list[dict[str, float]] = []
    with phases.phase("train"):
        for step in range(2):
            batch = _batch(step, rank, count, vocabulary)
            advantages = torch.where(batch.rewards > 0, 1.0, -1.0).repeat_interleave(batch.answer_lengths)
            # Of a model that knows nothing yet.
            old = batch.logprobs - math.log(vocabulary)
            targets = TokenTargets(advantages=advantages, old_logprobs=old)
            steps.append(learner.train(batch, targets, step).means())
    with phases.phase("sync, trained"):
        second = _last(messages(state.sent_weights(), 2, prefix="model."))
    with phases.phase("save"):
        state.save(str(folder / "checkpoint"))
    with phases.phase("export"):
        tensors = state.whole_tensors()
        if rank == 0:
            export(tensors, actor, tokenizer, folder / "model", lambda _aside, _fingerprints: None)
        for _ in tensors:
            pass
    result = {
        "peaks": phases.peaks,
        "seconds": phases.seconds,
        "fingerprints": [first, second],
        "exported": _fingerprint(folder / "model") if rank == 0 else second,
        "steps": steps,
    }
    if count > 1:
        dist.destroy_process_group()
    return result


def _last(messages: Iterator[Any]) -> str:
    """Go through the messages of an update, keeping none, and return the last."""
    last = None
    for message in messages:
        last = message
    return str(last)


def _fingerprint(folder: Path) -> str:
    """Return the fingerprint of the weights in a folder, of which one is held at a time."""
    from recipes.language.models.fingerprint import fingerprint
    from recipes.training.tensor_files import stored_tensors

    stored = stored_tensors(folder) or {}
    return fingerprint((name, tensor.rows(0, tensor.shape[0])) for name, tensor in stored.items())


def _batch(step: int, rank: int, count: int, vocabulary: int) -> Any:
    """Return this rank's share of four groups of two answers."""
    import random

    from recipes.language.answers.answer_batch import RolloutBatch
    from recipes.language.answers.sequences import Sequence

    groups: list[RolloutBatch] = []
    for group in range(rank, 4, count):
        drawn = random.Random(10 * step + group)
        answers = [
            Sequence(
                request_id=str(group),
                sample=sample,
                prompt=tuple(drawn.randrange(2, vocabulary) for _ in range(4)),
                tokens=tuple(drawn.randrange(2, vocabulary) for _ in range(6)),
                logprobs=(0.0,) * 6,
                versions=(0,) * 6,
                finish_reason="stop",
            )
            for sample in range(2)
        ]
        groups.append(RolloutBatch.of(answers, group, [0.0, 1.0]))
    return RolloutBatch.joined(groups)


def measure(count: int, model: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Return what each of `count` ranks measured.

    Raises:
        RuntimeError: one of them failed.
    """
    words = ["--model", str(model), *(["--set", *settings] if settings else [])]
    return run_ranks(sys.executable, Path(__file__), words, count)


def differences(measured: dict[int, list[dict[str, Any]]]) -> tuple[float, float, bool]:
    """Return the largest relative differences from the first number of ranks, of losses and of norms of gradients; and
    whether the weights that are sent before training are the same everywhere, and those that are exported the last ones
    sent.
    """
    means = {
        count: [
            {name: _over_ranks(name, [rank["steps"][step][name] for rank in ranks]) for name in ranks[0]["steps"][step]}
            for step in range(2)
        ]
        for count, ranks in measured.items()
    }
    first, *others = means.values()
    largest = {True: 0.0, False: 0.0}
    for other in others:
        for step, reference in zip(other, first, strict=True):
            for name in reference:
                # A sample of a shard, which is another for another number of ranks.
                if not name.endswith("weights_changed"):
                    difference = abs(step[name] - reference[name]) / max(abs(reference[name]), 1e-3)
                    is_norm = name.endswith("grad_norm")
                    largest[is_norm] = max(largest[is_norm], difference)
    prints = {rank["fingerprints"][0] for ranks in measured.values() for rank in ranks}
    exported = all(rank["exported"] == rank["fingerprints"][1] for ranks in measured.values() for rank in ranks)
    return largest[False], largest[True], len(prints) == 1 and exported


def _over_ranks(name: str, values: list[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def forecast(model: Path, count: int, settings: list[str]) -> int:
    """Return the bytes that the forecast of `rlinf inspect memory` has for training on one of `count` ranks, without
    what a process holds from the start, and what lies in shared memory for a receiver.
    """
    from recipes.language.language_memory import forecast as component_forecasts
    from rlinf_core.job.load import load_job

    overrides = [
        *(f"actor.model.model_path={model}", "actor.warm_start.steps=0", f"actor.max_tokens_per_micro_batch={_TOKENS}"),
        *("data.rollout_batch_size=4", "algorithm.group_size=2", "algorithm.n_minibatches=1"),
        *("data.max_prompt_length=4", "rollout.sampling_params.max_new_tokens=6", *settings),
    ]
    config: Any = load_job("math/sums-laptop", overrides, environ={}).config
    actor, *_ = component_forecasts(config, {"actor": count, "rollout": count, "reward": 1})
    return sum(size for part, size in actor.parts.items() if part not in ("base", "sent weights"))


def main(counts: list[int], width: int, layers: int, settings: list[str], report: Path | None) -> int:
    """Print the peaks of each phase, and their fit; return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        parameters = write_model(model, width, layers)
        print(
            f"{parameters / 1e6:.0f} M parameters; {' '.join(settings) or 'float32'}; MiB of a rank above its imports"
        )
        measured = {count: measure(count, model, settings) for count in counts}
        forecasts = [forecast(model, count, settings) / _MIB for count in counts]
    share = _TRAINED * 4 * parameters / _MIB
    print(f"{'phase':15}" + "".join(f"{count:>9}" for count in counts) + "   a + b / n")
    for phase in measured[counts[0]][0]["peaks"]:
        peaks = {count: max(rank["peaks"][phase] for rank in ranks) / _MIB for count, ranks in measured.items()}
        constant, slope = fitted(peaks)
        line = "".join(f"{peak:9.0f}" for peak in peaks.values())
        print(f"{phase:15}{line}   {constant:.0f} + {slope:.0f} / n", flush=True)
    print(f"{'train, forecast':15}" + "".join(f"{size:9.0f}" for size in forecasts))
    losses, norms, equal = differences(measured)
    print(f"a rank's share of weights, gradients and moments: {share:.0f} / n MiB")
    print(
        f"largest relative differences: of losses {losses:.1e}, of norms {norms:.1e};"
        f" weights sent and exported equal: {equal}"
    )
    if report is not None:
        report.write_text(json.dumps({"parameters": parameters, "ranks": measured}))
    return 0 if losses <= _NEAR and norms <= _NEAR and equal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="numbers of ranks")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the job")
    parser.add_argument("--json", type=Path, help="writes what every rank measured")
    for hidden, kind in (("--model", Path), ("--folder", Path), ("--rank", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        result = take_part(args.rank, args.ranks[0], args.model, args.folder, args.set)
        (args.folder / f"{args.rank}.json").write_text(json.dumps(result))
        sys.exit(0)
    sys.exit(main(args.ranks, args.width, args.layers, args.set, args.json))
