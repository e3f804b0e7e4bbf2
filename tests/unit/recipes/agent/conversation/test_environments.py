"""Environments of words: our own, OpenEnv's over the wire, and those of verifiers.

`RLINF_VERIFIERS_PYTHON` names an interpreter with that library and rlinf: `pip install "rlinf-cli[verifiers]"`
in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.conversation.agents import (
    AgentOutcome,
    AgentTask,
    EnvAgent,
    OpenEnv,
    OpenEnvError,
    TextEnvironment,
    TextStep,
    Treasure,
)
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.tool_config import OpenEnvOptions, VerifiersOptions
from recipes.agent.tools.tool import Toolbox, ToolUnavailable
from recipes.agent.verifiers_agent import VerifiersAgent, VerifiersError
from recipes.language.config.problem_config import MOST_GENERATED
from rlinf_core import ConfigError
from tests.unit.recipes.agent.scripted import SETTINGS, Script, tokens


class Counting(TextEnvironment):
    """An episode that ends with `stop`; a number is its own reward."""

    stop = (".",)
    closed = 0

    async def reset(self, seed: int) -> str:
        return f"seed {seed}:"

    async def step(self, text: str) -> TextStep:
        said = text.removesuffix(".")
        return TextStep("over", 2.0, True) if said == "stop" else TextStep("next:", float(said))

    async def close(self) -> None:
        Counting.closed += 1


class Own(TextEnvironment):
    """Gives what its first attribute says; a method of it need not be async."""

    first: Any = "go"
    then: Any = None

    async def reset(self, seed: int) -> str:
        return self.first

    async def step(self, text: str) -> TextStep:
        return self.then


def at_once(self: Any, seed: int) -> str:
    return "go"


@pytest.mark.parametrize(
    ("own", "error"),
    [
        ({"first": b"go"}, "`reset` of the environment returned bytes, not `str`"),
        ({"reset": at_once}, "`reset` of the environment returned str at once: write it with `async def`"),
        ({"then": ("text", 1.0, True)}, "`step` of the environment returned tuple, not `TextStep`"),
        ({"then": TextStep("on", float("nan"))}, "`reward` is nan"),
        ({"then": TextStep("on", "1")}, "`reward` is str, not a number"),  # type: ignore[arg-type]
    ],
)
def test_what_an_environment_may_not_return_is_named(own: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        played("1.", make=type("Own", (Own,), own))


def played(*turns: str, make: Any = Counting) -> tuple[AgentOutcome, LanguageModel]:
    model = LanguageModel(Script(*turns), SETTINGS._replace(max_tokens=200))
    task = AgentTask("episode 7", (ChatMessage("user", "episode 7"),), "", {"seed": 7})
    return asyncio.run(EnvAgent(make)(task, model, Toolbox((), 30.0))), model


def test_what_an_environment_says_is_told_and_not_learned() -> None:
    outcome, model = played("0.", "3.", "stop.")
    assert outcome == AgentOutcome(answer="stop.", reward=2.0, parts={"return": 5.0, "unfinished": 0.0})
    (segment,) = model.segments()
    assert segment.prompt == tokens("seed 7:")
    assert segment.tokens == tokens("0.next:3.next:stop.")
    assert [token for token, drawn in zip(segment.tokens, segment.trained, strict=True) if drawn] == [
        *tokens("0.3.stop."),
    ]


def test_an_episode_that_has_no_end_keeps_what_was_gained() -> None:
    before = Counting.closed
    outcome, _ = played("1.", "1.", "1.", "1.", "1.")
    assert outcome == AgentOutcome(reward=0.0, parts={"return": 4.0, "unfinished": 1.0})
    assert Counting.closed == before + 1


MOVES = ("north", "south", "west", "east")


def said(seed: int, *texts: str) -> tuple[str, list[TextStep]]:
    async def run() -> tuple[str, list[TextStep]]:
        game = Treasure()
        return await game.reset(seed), [await game.step(text) for text in texts]

    return asyncio.run(run())


def room(text: str) -> str:
    return re.findall(r"(\d) \(", text)[-1]


def solution(seed: int) -> list[str]:
    """Return the shortest way to the treasure, found by walking."""
    first, _ = said(seed)
    goal = re.findall(r"find room (\d)", first)[0]
    ways = deque([([], room(first))])
    seen = {room(first)}
    while True:
        way, here = ways.popleft()
        if here == goal:
            return way
        for move in MOVES:
            last = said(seed, *way, move)[1][-1].text
            if "(" in last and room(last) not in seen:
                seen.add(room(last))
                ways.append(([*way, move], room(last)))


@pytest.mark.parametrize("seed", range(5))
def test_the_treasure_can_be_found_and_taken(seed: int) -> None:
    way = solution(seed)
    _, steps = said(seed, *way, "Take\n")
    assert [step.reward for step in steps] == [0.0] * len(way) + [1.0]
    assert [step.done for step in steps] == [False] * len(way) + [True]


def test_a_seed_is_a_game() -> None:
    assert said(3) == said(3)
    assert len({said(seed)[0] for seed in range(20)}) == 20


def test_what_is_no_move_costs_one_and_there_are_twelve() -> None:
    _, steps = said(0, *["dance"] * 12)
    assert steps[0] == TextStep("say north, south, west, east or take. ")
    assert [step.done for step in steps] == [False] * 11 + [True]


def test_nothing_is_taken_elsewhere() -> None:
    assert said(0, "take")[1] == [TextStep("it is not here. ")]


def test_skilled_examples_take_the_treasure_others_wander() -> None:
    async def played(seed: int, skill: float) -> tuple[float, int]:
        game, chance, gained, missed = Treasure(), random.Random(seed), 0.0, 0
        await game.reset(seed)
        for _ in range(12):
            step = await game.step(game.example(chance, skill))
            assert not step.text.startswith(("say", "there is a wall"))
            gained, missed = gained + step.reward, missed + step.text.startswith("it is not here")
            if step.done:
                break
        return gained, missed

    well = [asyncio.run(played(seed, 1.0)) for seed in range(40)]
    badly = [asyncio.run(played(seed, 0.0)) for seed in range(40)]
    assert sum(missed for _, missed in well) == 0
    assert sum(missed for _, missed in badly) > 0
    assert sum(gained for gained, _ in well) > sum(gained for gained, _ in badly) > 0


websockets = pytest.importorskip("websockets.asyncio.server")


async def _serve(connection: Any) -> None:
    """Play one session: an echo with the length of what was said as its reward; `end` ends it."""
    assert connection.request.path == "/ws"
    seed = None
    async for text in connection:
        message = json.loads(text)
        if message["type"] == "reset":
            seed, observation, reward, done = message["data"]["seed"], {"echo": "hello", "turn": 0}, None, False
        elif set(message["data"]) != {"message"}:
            error = {"message": "an action has a message", "code": "VALIDATION_ERROR"}
            await connection.send(json.dumps({"type": "error", "data": error}))
            continue
        else:
            said = message["data"]["message"]
            observation, reward, done = {"echo": f"{seed} {said}", "turn": 1}, len(said), said == "end"
        observation = {**observation, "board": [[True, None]]}
        data = {"observation": observation, "reward": reward, "done": done}
        await connection.send(json.dumps({"type": "observation", "data": data}))


@asynccontextmanager
async def _server() -> AsyncGenerator[str]:
    async with websockets.serve(_serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _episode(action_key: str, observation_key: str | None, *texts: str) -> list[Any]:
    async with _server() as url:
        environment = OpenEnv(OpenEnvOptions(url=url, action_key=action_key, observation_key=observation_key))
        try:
            return [await environment.reset(5), *[await environment.step(text) for text in texts]]
        finally:
            await environment.close()


def test_an_episode() -> None:
    seen = asyncio.run(_episode("message", None, "go", "end"))
    assert seen == ["hello", TextStep("5 go", 2.0, False), TextStep("5 end", 3.0, True)]


def test_the_key_of_an_observation() -> None:
    assert asyncio.run(_episode("message", "turn", "go")) == ["0", TextStep("1", 2.0, False)]
    assert asyncio.run(_episode("message", "board")) == ["[[true, null]]"]
    with pytest.raises(OpenEnvError, match="no `text`; it has echo, turn, board"):
        asyncio.run(_episode("message", "text"))


def test_what_the_server_refuses() -> None:
    with pytest.raises(OpenEnvError, match="VALIDATION_ERROR: an action has a message"):
        asyncio.run(_episode("text", None, "go"))


async def test_many_episodes_at_once_have_sessions_of_their_own() -> None:
    result = await asyncio.gather(*(_episode("message", None, str(number)) for number in range(20)))
    assert [item[1].text for item in result] == [f"5 {number}" for number in range(20)]


def test_a_server_that_is_not_there_is_no_fault_of_the_model() -> None:
    with pytest.raises(ToolUnavailable, match="does not respond"):
        asyncio.run(OpenEnv(OpenEnvOptions(url="http://127.0.0.1:1")).reset(0))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("no JSON", "not JSON"),
        ("[]", "no `data`"),
        ('{"data": {"observation": {}, "reward": "much"}}', "the reward is 'much'"),
        ('{"data": {"observation": {}, "reward": NaN}}', "the reward is nan"),
        ('{"data": {"observation": {}, "done": "no"}}', "`done` is 'no'"),
        ("", "disconnected"),
    ],
)
async def test_a_server_that_speaks_otherwise_is_no_fault_of_the_model(answer: str, why: str) -> None:
    async def act(connection: Any) -> None:
        await connection.recv()
        if answer:
            await connection.send(answer)

    async with websockets.serve(act, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ToolUnavailable, match=why):
            await OpenEnv(OpenEnvOptions(url=f"ws://127.0.0.1:{port}")).reset(0)


PYTHON = os.environ.get("RLINF_VERIFIERS_PYTHON", "")
PROGRAM = "tests.unit.recipes.agent.conversation.verifiers_episode"
ROOT = Path(__file__).parents[5]
CALL = '<tool_call>{"name": "backwards", "arguments": {"word": "%s"}}</tool_call>'

with_verifiers = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="RLINF_VERIFIERS_PYTHON names no interpreter with verifiers"),
]


def really_played(*turns: str, seed: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the program of `verifiers_episode.py` printed."""
    asked = json.dumps({"options": options or {}, "seed": seed, "turns": turns})
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [PYTHON, "-m", PROGRAM, asked], capture_output=True, text=True, check=True, env=env, cwd=ROOT, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


class TestRealOnes:
    """With the library, as it is installed."""

    pytestmark = with_verifiers

    def test_its_reward_is_that_of_the_run(self) -> None:
        right, wrong = really_played("enots", seed=0), really_played("stone", seed=0)
        assert (right["reward"], wrong["reward"]) == (2.0, 0.0)
        assert right["parts"] == {"spelled": 2.0}
        assert right["told"] == [["system", "Answer by one word."], ["user", "Spell stone backwards."]]
        assert right["drawn"] == ["enots\0"]

    def test_its_tools_are_called_and_not_learned(self) -> None:
        episode = really_played(CALL % "river", "revir", seed=MOST_GENERATED, options={"with_tool": True})
        assert episode["reward"] == 2.0
        # A task of evaluation: the first, which no seed of training leads to.
        assert episode["told"][1:] == [["user", "Spell river backwards."], ["tool", "revir"]]
        assert episode["drawn"] == [f"{CALL % 'river'}\0revir\0"]

    def test_a_run_without_further_turns_is_scored_as_it_is(self) -> None:
        episode = really_played(*[CALL % "stone"] * 4, seed=0, options={"with_tool": True})
        assert episode["reward"] == 0.0


class Stub:
    """An environment as verifiers has them, of which an episode is one question."""

    def __init__(self, tasks: int) -> None:
        self.taskset = list(range(tasks))
        self.asked: list[int] = []
        self.served = 0

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        self.served += 1
        yield

    async def run_episode(self, task: int, context: Any) -> Any:
        self.asked.append(task)
        request = urllib.request.Request(
            f"{context.client.base_url}/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": f"task {task}"}]}).encode(),
            {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}"},
        )
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        said = answer["choices"][0]["message"]["content"]
        rewards = {"length": SimpleNamespace(value=float(len(said))), "judge": None}
        errors = [SimpleNamespace(type="TaskError", message="no score")] if said == "bad" else []
        seats = [SimpleNamespace(trainable=True), SimpleNamespace(trainable=False)]
        traces = [SimpleNamespace(agent=seat, rewards=rewards, reward=float(len(said)), errors=[]) for seat in seats]
        return SimpleNamespace(ok=not errors, errors=errors, traces=traces)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tasks=5)
    library = SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    module = "recipes.agent.verifiers_agent"
    monkeypatch.setattr(f"{module}.missing_modules", lambda names: [])
    monkeypatch.setattr(f"{module}._loaded", lambda settings: made)
    return made


async def outcomes(agent: VerifiersAgent, *seeds: int, says: str = "hello") -> list[AgentOutcome]:
    models = [LanguageModel(Script(says), SETTINGS._replace(max_tokens=400)) for _ in seeds]
    tasks = [AgentTask("", (), "", {"seed": seed}) for seed in seeds]
    return await asyncio.gather(
        *(agent(task, model, Toolbox((), 30.0)) for task, model in zip(tasks, models, strict=True))
    )


def test_episodes_share_a_server_with_tokens_of_their_own(stub: Stub) -> None:
    result = asyncio.run(outcomes(VerifiersAgent(VerifiersOptions(taskset="words"), 2), 0, 1, 2))
    assert result == [AgentOutcome(reward=5.0, parts={"length": 5.0})] * 3
    assert stub.served == 1
    assert not any(name.startswith("VERIFIERS_API_KEY") for name in os.environ)


def test_tasks_of_evaluation_are_never_trained_on(stub: Stub) -> None:
    agent = VerifiersAgent(VerifiersOptions(taskset="words"), 200)
    asyncio.run(outcomes(agent, *range(6)))
    trained = set(stub.asked)
    stub.asked.clear()
    asyncio.run(outcomes(agent, *range(MOST_GENERATED, MOST_GENERATED + 6)))
    assert (trained, set(stub.asked)) == ({2, 3, 4}, {0, 1})


def test_a_failed_episode_is_a_failure_of_the_run(stub: Stub) -> None:
    agent = VerifiersAgent(VerifiersOptions(taskset="words"), 2)
    with pytest.raises(VerifiersError, match="TaskError: no score"):
        asyncio.run(outcomes(agent, 0, says="bad"))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.agent.verifiers_agent.missing_modules", list)
    with pytest.raises(ConfigError) as error:
        VerifiersAgent(VerifiersOptions(taskset="words"), 1)
    assert "verifiers>=0.4,<0.5" in str(error.value.help)
