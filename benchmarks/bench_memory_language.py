"""The forecast of memory of language models' recipes beside what processes held, by the peak of each phase.

    python benchmarks/bench_memory_language.py [--only NAME ...]

Each configuration runs two training steps in processes of its own, as in bench_memory.py, whose table this is. Where
answers are said to be of so many tokens none ends before, and a bonus for entropy lets all of them be learned from: a
forecast is of answers as long as they may be. `smollm2` needs the folder that SMOLLM2 names (configs/math_smollm.yaml).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.bench_memory import HEADER, compared, measured, summary
from rlinf_core.job.load import load_job

GOAL_CONFIGURATIONS: Final = 4
_MODEL_VARIABLE: Final = "SMOLLM2"
_ALL_LEARNED: Final = "algorithm.entropy_bonus=0.001"
_REFERENCE: Final = "cluster.component_placement.reference={node_group: node, placement: 0}"


class _Case(NamedTuple):
    """A shipped file with overrides."""

    config: str
    overrides: tuple[str, ...] = ()


def _answers(tokens: int, prompts: int) -> tuple[str, ...]:
    """Return overrides by which every answer is of so many tokens, and a step has so many prompts."""
    return (
        f"runner.seq_length={tokens + 24}",
        f"rollout.sampling_params={{max_new_tokens: {tokens}, min_new_tokens: {tokens}}}",
        f"data.rollout_batch_size={prompts}",
        _ALL_LEARNED,
    )


WIDE = ("actor.model={hidden_dim: 1024, num_layers: 3}", "actor.warm_start.steps=2")
CONFIGURATIONS: dict[str, _Case] = {
    "laptop": _Case("math_laptop"),
    "ppo": _Case("math_laptop_ppo"),
    "answers of 128": _Case("math_laptop", ("actor.model.hidden_dim=256", *_answers(128, 8))),
    "1024 wide": _Case("math_laptop", (*WIDE, *_answers(32, 4))),
    "1024 wide, ppo": _Case("math_laptop_ppo", (*WIDE, *_answers(32, 4))),
    "1024 wide, adapters": _Case("math_laptop", (*WIDE, *_answers(32, 4), "actor.model.lora={rank: 8, alpha: 16}")),
    "with a reference": _Case("math_laptop", (*WIDE, *_answers(32, 4), "algorithm.kl_beta=0.01", _REFERENCE)),
    "agents": _Case("agent_calculator", ("actor.warm_start.steps=50",)),
    "agents, 1024 wide": _Case("agent_calculator", (*WIDE, "data.rollout_batch_size=8", _ALL_LEARNED)),
    "smollm2": _Case("math_smollm", ("rollout.sampling_params.min_new_tokens=6", _ALL_LEARNED)),
}


def main(names: Sequence[str] = tuple(CONFIGURATIONS)) -> int:
    """Print a line for each process of the named configurations, and a summary; return the exit status."""
    ratios: dict[str, list[float]] = {}
    print(HEADER)
    for name in names:
        case = CONFIGURATIONS[name]
        if case.config == "math_smollm" and _MODEL_VARIABLE not in os.environ:
            print(f"{name:22} left out: {_MODEL_VARIABLE} names no folder", flush=True)
            continue
        job = load_job(case.config, (*case.overrides, "runner.val_check_interval=-1"))
        job.raise_if_bad()
        function = job.recipe.function("memory") if job.recipe is not None else None
        if function is None:
            raise RuntimeError(f"the recipe of {case.config} has no forecast")
        peaks = measured(case.config, case.overrides)
        ratios[name] = []
        for process in function(job.config, {}):
            ratios[name] += compared(
                name, process, {phase: held["rss"] for phase, held in peaks[process.component].items()}
            )
    return summary(ratios, GOAL_CONFIGURATIONS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), help="these alone"
    )
    sys.exit(main(parser.parse_args().only))
