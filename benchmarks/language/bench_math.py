"""The math recipe: what it learns in half a minute, and what a sample costs against TRL and a plain loop.

    python -m benchmarks.language.bench_math [--only PART ...] [--seeds 0 1 2] [--steps N] [--smollm-steps N]
        [--smollm2 FOLDER] [--trl PYTHON]

    python3 -m venv venv-trl && venv-trl/bin/pip install -c constraints.txt torch && \\
        venv-trl/bin/pip install -c constraints.txt trl==1.16.0 peft

makes the interpreter that `--trl` (or the variable TRL_PYTHON) names; without one those lines are left out. FOLDER (or
the variable SMOLLM2) is what configs/math/smollm2-laptop.yaml trains; its head says how to make it. CPU seconds are
those of all processes, Ray's included, from the first training step on; imports and start-up are left out on all sides.
Baselines run before and after each of our runs, of SmolLM2 before alone. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.meter import END, Meter
from recipes.math.config import MathConfig
from recipes.math.program import program
from rlinf_core.job.load import Job, load_job
from rlinf_core.runners.storage.run_folder import RunFolder

PARTS = ["tiny", "curve", "pretrained", "smollm"]
BASELINES = Path(__file__).parents[1] / "baselines" / "math_baselines.py"
# One optimizer step a training step, at one rate, as the baselines take it.
AS_BASELINES = (
    "algorithm.n_minibatches=1",
    "actor.optim.lr_warmup_steps=0",
    "actor.optim.lr_scheduler=constant",
    "actor.optim.lr=3.0e-4",
)
# Nothing but training steps.
BARE = (
    "runner.val_check_interval=-1",
    "runner.val_before_train=false",
    "runner.save_interval=-1",
    "runner.sample_interval=-1",
    "runner.save_format=dcp",
)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    what: str
    measured: str
    figure: str
    goal: str
    met: bool


def shipped(name: str, *overrides: str) -> tuple[Job, MathConfig]:
    """Return the job of a shipped config."""
    job = load_job(name, overrides, environ={})
    job.raise_if_bad()
    return job, cast("MathConfig", job.config)


def run(name: str, meter: Meter, *overrides: str, then: Callable[[Path], None] = lambda folder: None) -> None:
    """Run a shipped config, and do something with its run folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        job, config = shipped(name, f"runner.logger.log_path={folder}", *overrides)
        made = RunFolder.create(config.runner, "math")
        program(job, made, meter)
        then(made.path)


def curve(seeds: Sequence[int]) -> list[Result]:
    """Train the default config whole, by each seed."""
    results: list[Result] = []
    steps = shipped("math/sums-laptop")[1].runner.max_steps
    for seed in seeds:
        meter = Meter([steps])
        run("math/sums-laptop", meter, f"actor.seed={seed}", f"data.seed={seed}")
        rewards = [row["rollout/reward"] for row in meter.times]
        first, last = rewards[0], statistics.fmean(rewards[-5:])
        spent = (
            f"{meter.cpu(0, steps):.1f} cpu-s, {meter.wall(0, steps):.0f} s for {steps} steps,"
            f" start-up {meter.startup:.0f} s apart, load {os.getloadavg()[0]:.0f}"
        )
        results.append(
            Result(f"sampled reward, last 5 steps, seed {seed}", spent, f"{last:.3f}", ">= 0.88", last >= 0.88)
        )
        gain = last - first
        results.append(
            Result(f"gain over the warm start, seed {seed}", f"from {first:.3f}", f"{gain:.3f}", ">= 0.4", gain >= 0.4)
        )
    return results


def pretrained(seed: int, folder: str) -> list[Result]:
    """Train math/smollm2-laptop whole, and score what it leaves by plain transformers."""
    model = f"actor.model.model_path={folder}"
    _, config = shipped("math/smollm2-laptop", model)
    meter, elsewhere = Meter([]), list[float]()

    def score(made: Path) -> None:
        elsewhere.append(plain_score(made / "model", config))

    run("math/smollm2-laptop", meter, model, f"actor.seed={seed}", then=score)
    scores = {step: values["eval/pass@1"] for step, values in meter.evaluations.items()}
    first, last = scores[min(scores)], scores[max(scores)]
    cpu, before = meter.cpu_in_all(), sum(meter.marks[0][0].values())
    spent = f"{before:.0f} of them before the first step, {meter.wall(0, END):.0f} s after it"
    course = ", ".join(f"{score:.3f} after {step}" for step, score in scores.items())
    # Ties are broken by rounding, which differs between batches.
    same = abs(elsewhere[0] - last) <= 0.011
    what = f"by plain transformers, seed {seed}"
    return [
        Result(f"SmolLM2, greedy on other problems, seed {seed}", course, f"{last:.3f}", ">= 0.65", last >= 0.65),
        Result(f"SmolLM2, cpu-s of all processes, seed {seed}", spent, f"{cpu:.0f}", "<= 450", cpu <= 450),
        Result(f"SmolLM2, the saved model {what}", f"from {first:.3f}", f"{elsewhere[0]:.3f}", "the same", same),
    ]


def plain_score(folder: Path, config: MathConfig) -> float:
    """Return the share of the problems of evaluation that the model in a folder answers, without anything of ours."""
    from recipes.language.data.problem_sources import load_problems

    problems = load_problems(config.data, evaluation=True)
    asked = [(config.data.few_shot + problems[index].prompt, problems[index].answer) for index in range(len(problems))]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(
            {"model": str(folder), "problems": asked, "longest": config.rollout.sampling_params.max_new_tokens}, file
        )
        file.flush()
        command = [sys.executable, str(BASELINES), "score", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["score"])


def warm_model(folder: Path) -> None:
    """Write the model of the default config as it is after its warm start."""
    import torch

    from recipes.language.learning.warm_start import right_answers, warm_start
    from recipes.language.models.load_model import built_model, built_tokenizer
    from recipes.language.models.policy import LanguagePolicy

    torch.set_num_threads(1)
    _, config = shipped("math/sums-laptop")
    tokenizer: Any = built_tokenizer()
    model: Any = built_model(tokenizer, seed=config.actor.seed)
    warm_start(
        LanguagePolicy(model),
        right_answers(config, tokenizer),
        config.data.rollout_batch_size,
        config.actor.warm_start.lr,
    )
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def baseline(python: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `math_baselines.py` measured in its own process."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        done = subprocess.run(
            [python, str(BASELINES), kind, file.name],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": str(settings["threads"]), "PYTHONWARNINGS": "ignore"},
        )
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def settings_of(config: MathConfig, model: str, steps: int) -> dict[str, Any]:
    """Return what the baselines need to do as a config says: the same problems in the same order."""
    from recipes.language.data.problem_sources import load_problems
    from recipes.language.data.problems import training_order

    data, params = config.data, config.rollout.sampling_params
    problems = load_problems(data, evaluation=False)
    order = training_order(len(problems), 0, steps * data.rollout_batch_size, seed=data.seed, shuffle=data.shuffle)
    lora = config.actor.model.adapter()
    return {
        "model": model,
        "problems": [[data.few_shot + problems[index].prompt, problems[index].answer] for index in order],
        "steps": steps,
        "prompts": data.rollout_batch_size,
        "group_size": config.algorithm.group_size,
        "max_new_tokens": params.max_new_tokens,
        "lr": config.actor.optim.lr,
        "lora_rank": lora.rank if lora else 0,
        "threads": 1,
        "stop": params.stop[0] if params.stop else "",
    }


def against(
    name: str,
    title: str,
    model: str,
    steps: int,
    pythons: dict[str, str],
    goals: dict[str, float],
    *,
    both_sides: bool = True,
) -> list[Result]:
    """Return samples per CPU second of the recipe by those of each baseline, which runs before it, and after it."""
    overrides = (*BARE, *AS_BASELINES, f"runner.max_steps={steps}", f"actor.model.model_path={model}")
    overrides = (*overrides, "actor.threads=1")
    _, config = shipped(name, *overrides)
    settings = settings_of(config, model, steps)
    spent: dict[str, list[float]] = {kind: [] for kind in goals}
    rewards: dict[str, float] = {}

    def all_baselines() -> None:
        for kind in goals:
            record = baseline(pythons[kind], kind, settings)
            spent[kind].append(record["cpu_seconds"])
            rewards[kind] = statistics.fmean(record["rewards"][-5:])
            print(f"{title}: {record['samples']} samples in {record['cpu_seconds']:.1f} cpu-s by {kind}", flush=True)

    all_baselines()
    meter = Meter([steps])
    run(name, meter, *overrides)
    if both_sides:
        all_baselines()
    ours, samples = meter.cpu(0, steps), steps * config.answers_per_step
    print(f"{title}: {samples} samples in {ours:.1f} cpu-s by the recipe", flush=True)
    mine = statistics.fmean(row["rollout/reward"] for row in meter.times[-5:])
    results: list[Result] = []
    for kind, goal in goals.items():
        theirs = statistics.fmean(spent[kind])
        ratio = theirs / ours
        measured = (
            f"{samples / ours:.0f} samples/cpu-s against {samples / theirs:.0f}"
            f" ({', '.join(f'{samples / cpu:.0f}' for cpu in spent[kind])}); rewards {mine:.2f}, {rewards[kind]:.2f}"
        )
        results.append(Result(f"{title}, by {kind}", measured, f"{ratio:.2f}x", f">= {goal}x", ratio >= goal))
    return results


def table(results: Sequence[Result]) -> str:
    """Return the results as text."""
    lines = [
        f"{'goal missed: ' if not result.met else ''}{result.what}: {result.figure} ({result.goal})"
        for result in results
    ]
    return "\n".join(f"{line}\n    {result.measured}" for line, result in zip(lines, results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of the tiny model")
    parser.add_argument("--smollm-steps", type=int, default=2, metavar="N", help="of SmolLM2 against TRL")
    parser.add_argument("--smollm2", default=os.environ.get("SMOLLM2", "models/smollm2"), metavar="FOLDER")
    parser.add_argument("--trl", default=os.environ.get("TRL_PYTHON", ""), metavar="PYTHON")
    args = parser.parse_args()
    pythons = {"plain": sys.executable, "trl": args.trl}
    results: list[Result] = []
    if "tiny" in args.only:
        goals = {"plain": 0.9, **({"trl": 1.6} if args.trl else {})}
        with tempfile.TemporaryDirectory() as folder:
            warm_model(Path(folder) / "model")
            rows = against("math/sums-laptop", "one-digit sums", f"{folder}/model", args.steps, pythons, goals)
        results += rows
        print(table(rows), flush=True)
    if "curve" in args.only:
        rows = curve(args.seeds)
        results += rows
        print(table(rows), flush=True)
    if {"smollm", "pretrained"} & set(args.only) and not Path(args.smollm2).is_dir():
        print(
            f"SmolLM2 is left out: there is no `{args.smollm2}`; configs/math/smollm2-laptop.yaml says how to make it"
        )
    if "pretrained" in args.only and Path(args.smollm2).is_dir():
        for seed in args.seeds[:2]:
            rows = pretrained(seed, str(Path(args.smollm2).resolve()))
            results += rows
            print(table(rows), flush=True)
    if "smollm" in args.only and Path(args.smollm2).is_dir():
        goals = {"trl": 3.0} if args.trl else {"plain": 3.0}
        folder = str(Path(args.smollm2).resolve())
        # Before alone: TRL takes minutes, and up to 14 GB, for its whole batch at once.
        title = "SmolLM2, few-shot prompts"
        rows = against("math/smollm2-laptop", title, folder, args.smollm_steps, pythons, goals, both_sides=False)
        results += rows
        print(table(rows), flush=True)
    if not args.trl:
        print("TRL is left out: `--trl PYTHON` names an interpreter that has it; the head of this script says how")
    return 0 if all(row.met for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
