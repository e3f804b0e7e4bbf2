"""Peak memory of each rank that trains a vision-language-action policy together with others, at 1, 2 and 4 ranks.

    python -m benchmarks.embodied.bench_policy_ranks [--model pi0|smolvla] [--precision fp32|bf16] [--ranks 1 2 4]

A policy with random weights takes two optimizer steps of imitation, on four rows of pictures whatever the number of
ranks, over gloo with one thread each, and is saved. A peak is the largest resident set of a phase over ranks, less what
the process has after its imports. The fit is peak(n) = a + b / n by least squares; goals are that b is at least 0.9 of
what is divided among ranks (weights, gradients and two moments in float32), that losses are equal to 1e-4, and that
weights move. `--model smolvla` needs an interpreter with lerobot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.ranks import Phases, fitted, run_ranks
from benchmarks.table import Result, run_parts

ROWS: Final = 4
_MIB: Final = 2**20
_SIZES: Final = {
    "pi0": {"hidden_dim": 1024, "options": {"num_layers": 12, "max_prompt_tokens": 6, "steps": 2}},
    "smolvla": {"hidden_dim": 960, "options": {"num_layers": 10, "max_prompt_tokens": 8}},
}


def take_part(rank: int, count: int, kind: str, precision: str, folder: Path) -> dict[str, Any]:
    """Load, train and save as one of `count` ranks; return peaks, losses and how far weights moved."""
    import torch
    import torch.distributed as dist

    for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers"):
        import_module(name)
    from recipes.embodied.envs.env_spec import EnvSettings
    from recipes.embodied.envs.franka.franka_kin import FrankaVisionEnv
    from recipes.embodied.learning.policy_precision import computing
    from recipes.embodied.workers.actor_base import PolicyActor
    from recipes.training.weights.training_state import TrainingState
    from rlinf_core import load_job

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    config: Any = load_job("embodied/pick-laptop", (), environ={}).config
    model = type(config.actor.model).model_validate(
        {"model_type": kind, "num_action_chunks": 2, "precision": precision, **_SIZES[kind]}
    )
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"model": model})})
    env = FrankaVisionEnv(EnvSettings(num_envs=ROWS))
    worker: Any = SimpleNamespace(_config=config, _rank=rank, _world_size=count, torch_device=device)
    seen, phases = env.reset(), Phases()
    with phases.phase("load"):
        policy, initial = PolicyActor._first_policy(worker, env.spec)
        state = TrainingState(
            policy,
            config.actor.optim,
            config.actor.fsdp_config,
            rank=rank,
            world_size=count,
            device=device,
            blocks=policy.blocks,
            methods=("imitation_loss",),
            initial=initial,
        )
        del initial
    inputs = policy.prepare(seen)
    generator = torch.Generator().manual_seed(2)
    actions = policy.from_env((torch.rand(ROWS, 2, env.spec.action_size, generator=generator) * 2 - 1).numpy())
    losses: list[float] = []
    with phases.phase("train"):
        for _ in range(2):
            state.optimizer.zero_grad()
            mine = range(rank, ROWS, count)
            total = 0.0
            for row in mine:
                # What a flow draws is that of a row, on whatever rank.
                torch.manual_seed(row)
                part = {name: value[row : row + 1] for name, value in inputs.items()}
                valid = torch.ones(actions[row : row + 1].shape[:2], dtype=torch.bool)
                with computing(config.actor, device):
                    loss = policy.imitation_loss(part, actions[row : row + 1], valid) / len(mine)
                state.strategy.accumulate(last=row == mine[-1])
                loss.backward()
                total += float(loss.detach())
            state.strategy.finish_gradients()
            norm = state.strategy.gradient_norm()
            state.optimizer.step()
            losses.append(float(state.strategy.reduce_sum(torch.tensor(total))) / count)
    with phases.phase("save"):
        state.save(str(folder / "checkpoint"))
    size = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    if count > 1:
        dist.destroy_process_group()
    return {"peaks": phases.peaks, "losses": losses, "norm": float(norm), "parameters": size}


def results(args: argparse.Namespace) -> Iterator[Result]:
    """Yield the rows of all phases, and whether ranks learn alike."""
    words = ["--model", args.model, "--precision", args.precision]
    measured = {count: run_ranks(args.python, Path(__file__), words, count) for count in args.ranks}
    first = measured[min(measured)][0]
    for phase in ("load", "train", "save"):
        peaks = {count: max(rank["peaks"][phase] for rank in ranks) / _MIB for count, ranks in measured.items()}
        constant, shared = fitted(peaks)
        text = ", ".join(f"{peak:.0f}" for peak in peaks.values())
        share = shared * _MIB / (16 * first["parameters"])
        yield Result(
            f"{args.model} {args.precision}, {phase}",
            f"{text} MiB = {constant:.0f} + {shared:.0f} / n; {first['parameters'] / 1e6:.0f} M trained",
            f"{share:.2f}x",
            ">= 0.9x of 16 bytes each" if phase == "train" else "-",
            phase != "train" or share >= 0.9,
        )
    unlike = max(
        abs(ours - theirs) / abs(theirs)
        for ranks in measured.values()
        for rank in ranks
        for ours, theirs in zip(rank["losses"], first["losses"], strict=True)
    )
    goal = 1e-4 if args.precision == "fp32" else 2e-2
    yield Result("losses of two steps", "largest difference", f"{unlike:.1e}", f"<= {goal:g}", unlike <= goal)


def main() -> int:
    """Run the benchmark, or one rank of it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(_SIZES), default="pi0")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the ranks")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.rank is not None:
        result = take_part(args.rank, args.ranks[0], args.model, args.precision, args.folder)
        (args.folder / f"{args.rank}.json").write_text(json.dumps(result))
        return 0
    return run_parts({"ranks": lambda: results(args)}, None)


if __name__ == "__main__":
    sys.exit(main())
