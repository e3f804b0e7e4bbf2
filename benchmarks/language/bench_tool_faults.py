"""Learning beside a tool server that fails a tenth of its calls: these left out, as samples, and beside a sound one.

    python -m benchmarks.language.bench_tool_faults [--groups 1000] [--seeds 40]

The model is one number: how likely it is to ask the tool, which knows every answer, instead of guessing, which is right
in 19 of 20 cases. Runs, retries and failures are those of the agent workers; as samples, a run that a tool has failed
is a wrong answer. Advantages are those of GRPO. The mean of the curve with failures left out may be two standard
errors over the seeds from that beside a sound server. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from benchmarks.table import Result, run_parts
from recipes.agent.agent_config import AgentConfig
from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.tools.tool import Tool, Toolbox, ToolUnavailable
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.prompt_messages import Prompt
from recipes.language.data.problems import Problem
from rlinf_core.job.load import load_job

FAILS, GUESSED, BEGINNING = 0.1, 0.95, 0.5
GROUP, RATE = 8, 0.15
PROMPT = Prompt(0, 0, 1, 0, GROUP, 1.0)
CONFIG = load_job("agent/calculator-laptop", environ={}).config


class Lookup(Tool):
    """A server that knows every answer, and is down for a share of the calls."""

    name, description = "lookup", "knows the answer"

    def __init__(self, draws: random.Random, fails: float) -> None:
        self._draws, self._fails = draws, fails

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        if self._draws.random() < self._fails:
            raise ToolUnavailable("the server is down")
        return "right"


class Member(NamedTuple):
    """A run of a group: if it asked the tool, its reward, and if the tool failed it."""

    asked: bool
    reward: float
    failed: bool


class Runs(AgentWorker):
    """An agent worker in this process, whose model asks the tool with some probability."""

    _rank = 0  # pyright: ignore

    def __init__(self, config: AgentConfig, seed: int, fails: float) -> None:
        self._config, self._failures, self._draws = config, 0, random.Random(seed)
        self._tools, self._agent = [Lookup(self._draws, fails)], self._act
        self._client = cast("Any", SimpleNamespace(leave=lambda route: None))
        self._asked = False
        self._logit = math.log(BEGINNING / (1 - BEGINNING))

    def log_warning(self, *words: Any) -> None:
        """Say nothing."""

    @property
    def share(self) -> float:
        """Chance that the tool is asked."""
        return 1 / (1 + math.exp(-self._logit))

    async def _act(self, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
        self._asked = self._draws.random() < self.share
        if not self._asked:
            return AgentOutcome(reward=float(self._draws.random() < GUESSED))
        return AgentOutcome(reward=float((await tools.call("lookup", task.prompt)).text == "right"))

    async def group(self, number: int, *, as_samples: bool) -> list[Member]:
        """Return the runs of a group; with `as_samples` one that the tool fails is not repeated, and is a wrong one."""
        self._slots = asyncio.Semaphore(GROUP)
        problem, route, members = Problem(prompt=str(number), answer="right"), cast("Any", None), list[Member]()
        for sample in range(GROUP):
            begin = self._attempt if as_samples else self._run
            run = await begin(PROMPT, problem, sample, route)
            members.append(Member(self._asked, run.score.reward if run.score else 0.0, bool(run.failure)))
        return members if as_samples else [member for member in members if not member.failed]

    def learn(self, members: list[Member]) -> list[float]:
        """Follow the gradient of a group by GRPO's advantages, and return these."""
        rewards = [member.reward for member in members]
        spread = statistics.pstdev(rewards) if members else 0.0
        advantages = [(reward - statistics.fmean(rewards)) / (spread + 1e-6) for reward in rewards]
        if spread:
            share = self.share
            steps = (value * (member.asked - share) for value, member in zip(advantages, members, strict=True))
            self._logit += RATE * statistics.fmean(steps)
        return advantages


class Learned(NamedTuple):
    """The end of a training.

    Attributes:
        curve: how likely the tool is asked, after each tenth of the groups.
        advantage: mean of the runs that the tool has failed and that are learned from; None: there are none.
        failed: how many these are.
    """

    curve: list[float]
    advantage: float | None
    failed: int


async def trained(groups: int, seed: int, *, fails: float, as_samples: bool) -> Learned:
    """Return what comes of a training of that many groups, beside a server that fails a share of the calls."""
    worker, of_failed, curve = Runs(cast("AgentConfig", CONFIG), seed, fails), list[float](), list[float]()
    for number in range(groups):
        members = await worker.group(number, as_samples=as_samples)
        advantages = worker.learn(members)
        of_failed += [value for value, member in zip(advantages, members, strict=True) if member.failed]
        if (number + 1) % (groups // 10) == 0:
            curve.append(worker.share)
    return Learned(curve, statistics.fmean(of_failed) if of_failed else None, len(of_failed))


def measure(groups: int, seeds: int) -> Iterable[Result]:
    """Train all three ways, and compare the two that should be alike."""

    def train(first: int, *, fails: float, as_samples: bool) -> list[Learned]:
        seeds_here = range(first, first + seeds)
        return [asyncio.run(trained(groups, seed, fails=fails, as_samples=as_samples)) for seed in seeds_here]

    quiet = train(0, fails=0.0, as_samples=False)
    share = quiet_share = end_of(quiet)
    yield Result(
        f"A sound server: the tool is asked, after {groups} groups",
        figures_of(quiet),
        f"{share:.2f}",
        f"> {BEGINNING}",
        share > BEGINNING,
    )
    # Separate seeds: the same draws would make the curves alike by chance.
    left_out = train(seeds, fails=FAILS, as_samples=False)
    share, failed = end_of(left_out), sum(member.failed for member in left_out)
    yield Result(
        f"Failures are left out: the tool is asked, after {groups} groups",
        figures_of(left_out),
        f"{share:.2f}",
        f"> {BEGINNING}",
        share > BEGINNING and not failed,
    )
    if seeds > 1:
        difference, error = difference_of(quiet, left_out)
        yield Result(
            "Left out against sound: difference of the curves' means",
            f"standard error {error:.4f}; at the end {share - quiet_share:+.4f}; {seeds} seeds each",
            f"{difference:+.4f}",
            "<= 2 SE",
            abs(difference) <= 2 * error,
        )
    samples = train(0, fails=FAILS, as_samples=True)
    share = end_of(samples)
    yield Result(
        f"Failures are wrong answers: the tool is asked, after {groups} groups",
        figures_of(samples),
        f"{share:.2f}",
        f"< {BEGINNING}",
        share < BEGINNING,
    )


def end_of(runs: Sequence[Learned]) -> float:
    """Return how likely the tool is asked at the end, on average."""
    return statistics.fmean(member.curve[-1] for member in runs)


def figures_of(runs: Sequence[Learned]) -> str:
    """Return the curve on average, and what was learned from failures."""
    curve = " ".join(
        f"{statistics.fmean(points):.2f}" for points in zip(*(member.curve for member in runs), strict=True)
    )
    advantages = [member.advantage for member in runs if member.advantage is not None]
    advantage = f"mean advantage {statistics.fmean(advantages):+.2f}" if advantages else "none is learned from"
    return f"after each tenth {curve}; of {sum(member.failed for member in runs)} failed runs: {advantage}"


def difference_of(one: Sequence[Learned], other: Sequence[Learned]) -> tuple[float, float]:
    """Return by how much the mean of the other's curves is higher, and the standard error of that over the seeds."""
    here, there = ([statistics.fmean(member.curve) for member in runs] for runs in (one, other))
    error = math.sqrt(statistics.variance(here) / len(here) + statistics.variance(there) / len(there))
    return statistics.fmean(there) - statistics.fmean(here), error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=40)
    asked = parser.parse_args()
    return run_parts({"faults": lambda: measure(asked.groups, asked.seeds)}, None)


if __name__ == "__main__":
    sys.exit(main())
