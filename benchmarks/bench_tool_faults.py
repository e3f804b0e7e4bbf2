"""Learning beside a tool server that fails a tenth of its calls: with these left out, and as samples.

    python -m benchmarks.bench_tool_faults [--groups 1000] [--seeds 3]

The model is one number: how likely it is to ask the tool, which knows every answer, instead of guessing, which is right
in 19 of 20 cases. Runs, retries and failures are those of the agent workers; as samples, a run that a tool has failed
is a wrong answer. Advantages are those of GRPO. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from benchmarks.table import Result, run_parts
from recipes.agent.config import AgentConfig
from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.tools.tool import Tool, ToolUnavailable
from recipes.agent.tools.toolbox import Toolbox
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.data.problems import Problem
from recipes.language.loop.prompts import Prompt
from rlinf_core.job.load import load_job

FAILS, GUESSED, BEGINNING = 0.1, 0.95, 0.5
GROUP, RATE = 8, 0.15
PROMPT = Prompt(0, 0, 1, 0, GROUP, 1.0)
CONFIG = load_job("agent_calculator", environ={}).config


class Lookup(Tool):
    """A server that knows every answer, and is down for a tenth of the calls."""

    name, description = "lookup", "knows the answer"

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        if self._draws.random() < FAILS:
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

    def __init__(self, config: AgentConfig, seed: int) -> None:
        self._config, self._failures, self._draws = config, 0, random.Random(seed)
        self._tools, self._agent = [Lookup(self._draws)], self._act
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
            stats = (await begin(PROMPT, problem, sample, route)).stats
            members.append(Member(self._asked, float(stats.reward or 0.0), bool(stats.failure)))
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


async def trained(groups: int, seed: int, *, as_samples: bool) -> Learned:
    """Return what comes of a training of so many groups."""
    worker, of_failed, curve = Runs(cast("AgentConfig", CONFIG), seed), list[float](), list[float]()
    for number in range(groups):
        members = await worker.group(number, as_samples=as_samples)
        advantages = worker.learn(members)
        of_failed += [value for value, member in zip(advantages, members, strict=True) if member.failed]
        if (number + 1) % (groups // 10) == 0:
            curve.append(worker.share)
    return Learned(curve, statistics.fmean(of_failed) if of_failed else None, len(of_failed))


def measure(groups: int, seeds: int) -> Iterable[Result]:
    """Train both ways."""
    for as_samples in (False, True):
        runs = [asyncio.run(trained(groups, seed, as_samples=as_samples)) for seed in range(seeds)]
        share = statistics.fmean(member.curve[-1] for member in runs)
        curve = " ".join(
            f"{statistics.fmean(points):.2f}" for points in zip(*(member.curve for member in runs), strict=True)
        )
        advantages = [member.advantage for member in runs if member.advantage is not None]
        failed = sum(member.failed for member in runs)
        advantage = f"mean advantage {statistics.fmean(advantages):+.2f}" if advantages else "none is learned from"
        what = "Failures are wrong answers" if as_samples else "Failures are left out"
        met = share < BEGINNING if as_samples else share > BEGINNING and not failed
        yield Result(
            f"{what}: the tool is asked, after {groups} groups",
            f"after each tenth {curve}; of {failed} failed runs: {advantage}",
            f"{share:.2f}",
            f"{'<' if as_samples else '>'} {BEGINNING}",
            met,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    return run_parts({"faults": lambda: measure(asked.groups, asked.seeds)}, None)


if __name__ == "__main__":
    sys.exit(main())
