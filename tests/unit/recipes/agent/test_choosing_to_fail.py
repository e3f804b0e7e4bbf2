"""A policy that can choose to fail in a way that looks like machinery does not learn to."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.agent.conversation.agents import AgentTask, EnvAgent, TextEnvironment, TextStep
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest
from recipes.agent.tools.tool import CallLost, FunctionTool, Toolbox
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.answer_group import AnswerGroup
from recipes.language.answers.prompt_messages import Prompt
from recipes.language.data.problems import Problem
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.workers.reward_worker import RewardWorker
from rlinf_core.algorithms.advantages import group_advantages
from tests.unit.recipes.agent.local import agent_config
from tests.unit.recipes.language.in_threads import Hub, in_thread

# What the policy may say before and after it sees whether it is about to lose.
WORDS = {"play": ("safe", "risky"), "lost": ("give up", "fail")}
CHANCES = {"safe": 0.6, "risky": 0.3}
# To end a lost game as it should is worth a little; to fail there is worth nothing.
GIVING_UP = 0.2
GROUP = 8
RATE = 0.05


class Clock(selectors.SelectSelector):
    """A selector that lets no time pass: where nothing is ready the clock jumps to what is due next."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop by the clock of its selector."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class StandIn:
    """A policy of four words, trained by the advantages of GRPO."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._logits = {state: dict.fromkeys(words, 0.0) for state, words in WORDS.items()}

    def shares(self, state: str) -> dict[str, float]:
        weights = {word: math.exp(logit) for word, logit in self._logits[state].items()}
        return {word: weight / sum(weights.values()) for word, weight in weights.items()}

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        state = "lost" if request.context else "play"
        chance = random.Random(f"{self._seed} {request.seed} {request.sample} {state}")
        shares = self.shares(state)
        (word,) = chance.choices(list(shares), list(shares.values()))
        token = [*WORDS["play"], *WORDS["lost"]].index(word)
        return DrawnTurn(0, (9,), (token,), (math.log(shares[word]),), (0,), word, "stop")

    def learn(self, words: tuple[str, ...], advantage: float) -> None:
        for state, word in zip(WORDS, words, strict=False):
            for other, share in self.shares(state).items():
                self._logits[state][other] += RATE * advantage * (float(other == word) - share)


def lucky(task: AgentTask, llm: LanguageModel, word: str) -> bool:
    return random.Random(f"{task.prompt} {llm.settings.sample}").random() < CHANCES[word]


def player(fail: Callable[[Toolbox], Any]) -> Any:
    """Return an agent that wins by chance, and where it loses gives up or fails as it is told to."""

    async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
        chat = llm.conversation(task.prompt)
        if lucky(task, llm, (await chat.reply()).text):
            return "won"
        chat.add("you are losing")
        if (await chat.reply()).text == "fail":
            await fail(tools)
        else:
            chat.credit(GIVING_UP)
        return "lost"

    return agent


async def hang(tools: Toolbox) -> None:
    await asyncio.Event().wait()


async def stumble(tools: Toolbox) -> None:
    raise KeyError("the word that the program looks for")


async def wait_for_a_tool(tools: Toolbox) -> None:
    await tools.call("lookup", "what hangs")


async def break_a_tool(tools: Toolbox) -> None:
    await tools.call("lookup", "what breaks")


async def lookup(argument: str) -> str:
    """Look something up."""
    if argument == "what breaks":
        raise ConnectionResetError("the other side has gone")
    return await asyncio.Event().wait() or argument


class Session(TextEnvironment):
    """The same game as an environment, whose session breaks at a word."""

    async def reset(self, seed: int) -> str:
        self._chance = random.Random(f"game {seed}")
        return "play"

    async def step(self, text: str) -> TextStep:
        if text == "fail":
            raise CallLost("the session is gone")
        if text == "give up":
            return TextStep("lost", GIVING_UP, True)
        return TextStep("you are losing", 0.0) if self._chance.random() > CHANCES[text] else TextStep("won", 1.0, True)


WAYS: dict[str, Any] = {
    "time": player(hang),
    "exception": player(stumble),
    "hanging tool": player(wait_for_a_tool),
    "broken tool": player(break_a_tool),
    "broken session": EnvAgent(Session),
}


class LocalAgents(AgentWorker):
    """An agent worker in this process, whose groups stay here."""

    _rank = 0  # type: ignore[assignment]  # pyright: ignore

    def log_warning(self, *words: Any) -> None:
        pass

    def _hand_on(self) -> None:
        """Keep the groups."""


class Loop:
    """Groups of runs from a stand-in policy, through agent and reward worker, to its next logits."""

    def __init__(self, agent: Any, seed: int) -> None:
        self._policy = StandIn(seed)
        self._agents: Any = LocalAgents.__new__(LocalAgents)
        config = agent_config(
            agent={"timeout": 30.0, "tool_timeout": 5.0, "max_turns": 4},
            reward={"reward_type": "exact"},
            algorithm={"group_size": GROUP},
        )
        self._agents._config, self._agents._agent, self._agents._failures = config, agent, 0
        self._agents._tools, self._agents._whole = [FunctionTool(lookup)], []
        route = SimpleNamespace(draw=self._policy.draw)
        self._agents._client = SimpleNamespace(route=lambda runs: route, leave=lambda route: None)
        rewards: Any = in_thread(RewardWorker, "reward", Hub(), 0, 1)(config)
        rewards.log_warning = self._agents.log_warning
        rewards.init_worker(LanguageLayout(1, 1, 1, "answers", "scored"))
        self._rewards = rewards

    async def run(self, groups: int) -> list[float]:
        """Return the share of failing runs in each group."""
        self._agents._slots = asyncio.Semaphore(GROUP)
        result: list[float] = []
        for number in range(groups):
            problem = Problem(prompt=f"game {number}", answer="won", row={"seed": number})
            self._agents._tasks = {True: [problem]}
            await self._agents._answer(Prompt(0, 0, number + 1, 0, GROUP, 1.0))
            group = self._agents._whole.pop()
            result.append(self._learn(group))
        return result

    def _learn(self, group: AnswerGroup) -> float:
        ((_, learned),) = self._rewards._score_groups([group])
        names = [*WORDS["play"], *WORDS["lost"]]
        said = {
            answer.sample: tuple(
                names[token] for token, drawn in zip(answer.tokens, answer.trained, strict=True) if drawn
            )
            for answer in group.answers
        }
        if learned is not None:
            kept = [(reward, said[one.sample]) for one, reward in zip(learned.answers, learned.rewards, strict=True)]
            advantages = group_advantages(torch.tensor([reward for reward, _ in kept]), len(kept))
            for (_, words), advantage in zip(kept, advantages.tolist(), strict=True):
                self._policy.learn(words, advantage)
        return sum("fail" in words for words in said.values()) / len(said)


def shares_of_failures(agent: Any, seed: int, groups: int) -> tuple[float, float]:
    """Return the share of runs in which the policy chose to fail, in the first tenth of the groups and in the last."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        shares = runner.run(Loop(agent, seed).run(groups))
    tenth = groups // 10
    return sum(shares[:tenth]) / tenth, sum(shares[-tenth:]) / tenth


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_does_not_learn_to_fail(way: str) -> None:
    first, last = shares_of_failures(WAYS[way], 1, 100)
    assert first > 0.1
    assert last <= first


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_policy_does_not_learn_to_fail_in_many_groups(way: str, seed: int) -> None:
    first, last = shares_of_failures(WAYS[way], seed, 1000)
    print(f"{way}, seed {seed}: {first:.3f} in the first tenth, {last:.3f} in the last")
    assert last <= first
