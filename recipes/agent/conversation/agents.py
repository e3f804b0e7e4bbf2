"""Agents: their inputs and outcomes, and those that come with rlinf, among them the one that plays text environments.

`tool_agent` calls tools until it answers. The stand-in of a rehearsal takes as many turns, and waits as long for tools,
as recorded runs. In a text environment, model turns are actions and its texts are input: examples are a search for
treasure in a house of nine rooms, and OpenEnv servers with one WebSocket session per episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

from recipes.agent.conversation.call_forms import find_calls
from recipes.agent.conversation.chat_model import LanguageModel, LimitReached, ModelReply
from recipes.agent.conversation.turn_messages import ChatMessage, ToolOffer
from recipes.agent.tool_config import OpenEnvOptions, TextEnvironmentConfig
from recipes.agent.tools.tool import CallLost, Toolbox, ToolUnavailable
from recipes.language.rewards.functions import finite
from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.process import pacing
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.registry import import_target


class AgentTask(NamedTuple):
    """A task of an agent.

    Attributes:
        prompt: the question.
        messages: the messages that put the question to the model.
        answer: the reference answer, for agents that judge themselves.
        row: all fields of the task in its source.
    """

    prompt: str
    messages: tuple[ChatMessage, ...]
    answer: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The outcome of a run.

    Attributes:
        answer: the text for `reward.reward_type` to score.
        reward: the reward; None: `answer` is scored.
        parts: named parts of the reward, which become metrics.
    """

    answer: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


# An agent: a custom function, or one of those below. A returned text is an outcome with that answer.
Agent = Callable[[AgentTask, LanguageModel, Toolbox], Awaitable[AgentOutcome | str]]


async def tool_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Let the model use tools until it writes a turn without a call, its answer.

    It calls functions if the toolbox offers any and the chat template teaches a form; else it makes one plain call per
    turn.
    """
    functions = tuple(json.dumps(function, ensure_ascii=False) for function in tools.functions)
    chat = llm.conversation(*task.messages, tools=ToolOffer(functions, tools.instructions) if functions else None)
    while True:
        reply = await chat.reply(stop=tools.stop)
        messages = await _answers(tools, reply)
        if not messages:
            return AgentOutcome(answer=reply.text)
        for message in messages:
            chat.add(message)


async def _answers(tools: Toolbox, reply: ModelReply) -> list[ChatMessage]:
    """Run the calls in a turn, and return the messages with their results; empty without calls."""
    if reply.form is None:
        # If a special token ends the turn, only the text without special tokens ends with the call.
        call = tools.find_call(reply.raw, thinking=reply.thinking) or tools.find_call(
            reply.text, thinking=reply.thinking
        )
        if call is None:
            return []
        return [ChatMessage("tool", tools.written(await tools.call(call.name, call.argument)))]
    schemas = {function["function"]["name"]: function["function"]["parameters"] for function in tools.functions}
    _, calls = find_calls(reply.raw, reply.form, schemas, thinking=reply.thinking)
    seen = await asyncio.gather(*(tools.call(call.name, json.loads(call.arguments)) for call in calls))
    return [
        ChatMessage("tool", observation.text, call_id=call.call_id, name=call.name)
        for call, observation in zip(calls, seen, strict=True)
    ]


# Names in records: the sizes of conversations in tokens, and constants of `LanguageFlow.constants`.
_ANSWER: Final = "answer"
_TURNS, _PAUSE = "driver/turns", "driver/pause"


async def stand_in_agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    """Hold a stand-in conversation whose tokens are spread evenly over its turns."""
    settings = llm.settings
    draws = random.Random(f"{task.prompt}:{settings.seed}:{settings.sample}")
    lengths, numbers = zip(*(pacing.recorded(_ANSWER) or ((settings.max_new_tokens, 1),)), strict=True)
    (tokens,) = draws.choices(lengths, numbers)
    mean = _constant(_TURNS, 1.0)
    # Round at random, so that the mean is the recorded mean.
    turns = max(1, min(settings.max_turns, int(mean) + (draws.random() < mean % 1)))
    chat = llm.conversation(*task.messages)
    for turn in range(turns):
        if turn:
            await asyncio.sleep(_constant(_PAUSE, 0.0))
            chat.add(".")
        await chat.reply(max_new_tokens=max(1, round(tokens / turns)))
    return AgentOutcome(answer="")


def _constant(phase: str, otherwise: float) -> float:
    sizes = pacing.recorded(phase)
    return sizes[0][0] if sizes else otherwise


class TextStep(NamedTuple):
    """A step of an environment: the text for the model, the reward of its turn, and whether the episode is over."""

    text: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(ABC):
    """A text environment; one object plays one episode.

    Attributes:
        stop: texts that end a turn of the model.
    """

    stop: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    async def reset(self, seed: int) -> str:
        """Start the episode of a seed, and return the initial text for the model."""

    @abstractmethod
    async def step(self, text: str) -> TextStep:
        """Perform the model's action."""

    def example(self, chance: random.Random, skill: float) -> str:
        """Return a valid action for the warm start of models built from scratch; "": none.

        Args:
            chance: the random numbers.
            skill: the share of examples that lead to success; the others are only valid.
        """
        return ""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources of the episode."""


_SIDE: Final = 3
_MOST_MOVES: Final = 12
# The share of the other examples that say `take` in any room.
_TAKES: Final = 0.3
_MOVES: Final = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
_ROOMS: Final = "123456789"


class Treasure(TextEnvironment):
    """A house of nine rooms with numbers. A turn is a direction, or `take`; the reward is 1 for the treasure.

    The first text names the room of the treasure; each text names the model's room and its doors: `7 (north, west).`
    The model must remember the goal and find the way.
    """

    stop: ClassVar[tuple[str, ...]] = (".", "\n")

    async def reset(self, seed: int) -> str:
        chance = random.Random(f"treasure {seed}")
        self._rooms = chance.sample(_ROOMS, len(_ROOMS))
        places = [(x, y) for x in range(_SIDE) for y in range(_SIDE)]
        self._at, self._goal = chance.sample(places, 2)
        self._moves = 0
        return f"find room {self._room(self._goal)} and take. {self._seen()}"

    async def step(self, text: str) -> TextStep:
        said = text.strip(" .\n").lower()
        self._moves += 1
        over = self._moves >= _MOST_MOVES
        if said == "take":
            reached = self._at == self._goal
            return TextStep("you have it. " if reached else "it is not here. ", float(reached), reached or over)
        if said not in _MOVES:
            return TextStep(f"say {', '.join(_MOVES)} or take. ", 0.0, over)
        (x, y), (right, down) = self._at, _MOVES[said]
        if not (0 <= x + right < _SIDE and 0 <= y + down < _SIDE):
            return TextStep("there is a wall. ", 0.0, over)
        self._at = (x + right, y + down)
        return TextStep(self._seen(), 0.0, over)

    def example(self, chance: random.Random, skill: float) -> str:
        """See `TextEnvironment`: a direction with a door, or `take`, which succeeds at the treasure."""
        take = self._at == self._goal if chance.random() < skill else chance.random() < _TAKES
        return "take." if take else f"{chance.choice(self._doors())}."

    def _doors(self) -> list[str]:
        x, y = self._at
        return [name for name, (right, down) in _MOVES.items() if 0 <= x + right < _SIDE and 0 <= y + down < _SIDE]

    def _room(self, place: tuple[int, int]) -> str:
        return self._rooms[place[1] * _SIDE + place[0]]

    def _seen(self) -> str:
        return f"{self._room(self._at)} ({', '.join(self._doors())}). "


_LARGEST_MESSAGE: Final = 16 << 20


class OpenEnvError(Exception):
    """An error response of an OpenEnv server."""


class OpenEnv(TextEnvironment):
    """An episode of an OpenEnv server.

    Raises:
        ConfigError: the package websockets is missing.
    """

    def __init__(self, settings: OpenEnvOptions) -> None:
        if missing_modules(["websockets"]):
            raise ConfigError("`openenv` needs the package websockets", help=f"run `{install_command('websockets')}`")
        self._settings = settings
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        """See `TextEnvironment`.

        Raises:
            ToolUnavailable: the server does not respond, or violates the protocol.
            OpenEnvError: the server cannot begin the episode.
        """
        client: Any = import_module("websockets.asyncio.client")
        url = (
            self._settings.url.replace("http", "ws", 1) if self._settings.url.startswith("http") else self._settings.url
        )
        try:
            self._socket = await client.connect(f"{url.rstrip('/')}/ws", max_size=_LARGEST_MESSAGE, proxy=None)
        except (OSError, _library_error()) as error:
            raise ToolUnavailable(f"the OpenEnv server {self._settings.url} does not respond: {error}") from None
        return (await self._answer("reset", {"seed": seed})).text

    async def step(self, text: str) -> TextStep:
        """See `TextEnvironment`.

        Raises:
            CallLost: the server disconnected, or violates the protocol.
            OpenEnvError: the server rejects the action.
        """
        return await self._answer("step", {self._settings.action_key: text})

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> TextStep:
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer: Any = load_json(await self._socket.recv(), non_finite=True)
        except (OSError, _library_error()) as error:
            raise CallLost(f"the OpenEnv server {self._settings.url} disconnected: {error}") from None
        except ValueError:
            raise self._stranger("a response is not JSON") from None
        message = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if not isinstance(message.get("data"), dict):
            raise self._stranger("a response has no `data`")
        fields = cast("dict[str, Any]", message["data"])
        if message.get("type") == "error":
            raise OpenEnvError(f"{fields.get('code', 'error')}: {fields.get('message', '')}")
        reward, done = fields.get("reward"), fields.get("done")
        if not isinstance(reward, int | float | None) or not math.isfinite(reward or 0.0):
            raise self._stranger(f"the reward is {reward!r}, not a number")
        if not isinstance(done, bool | None):
            raise self._stranger(f"`done` is {done!r}, neither true nor false")
        return TextStep(self._text(fields.get("observation")), float(reward or 0.0), bool(done))

    def _stranger(self, why: str) -> ToolUnavailable:
        return CallLost(f"the server {self._settings.url} violates the OpenEnv protocol: {why}")

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            return _written(observation)
        fields = cast("dict[str, Any]", observation)
        key = self._settings.observation_key
        if key is not None:
            if key not in fields:
                raise OpenEnvError(f"an observation has no `{key}`; it has {', '.join(fields)}")
            return _written(fields[key])
        texts = [field for field in fields.values() if isinstance(field, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)


def _written(value: Any) -> str:
    """Return a part of an observation as a text: JSON if it is none, and "" for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _library_error() -> type[Exception]:
    """Return the base class of the exceptions of `websockets`."""
    return import_module("websockets.exceptions").WebSocketException


T = TypeVar("T")


class EnvAgent:
    """Plays an episode in each run; the task gives the seed.

    The last turn's reward is the outcome's; earlier rewards are credited to their turns.

    Args:
        make: makes an environment.
    """

    def __init__(self, make: Callable[[], TextEnvironment]) -> None:
        self._make = make

    async def __call__(self, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
        """Play, and return the outcome; an agent as `Agent` says.

        Raises:
            TypeError, ValueError: a method of the environment is not async, or returned another type or number.
        """
        environment = self._make()
        try:
            first = await _returned("reset", environment.reset(int(task.row.get("seed", 0))), str)
            before = [message for message in task.messages if message.role == "system"]
            chat = llm.conversation(*before, ChatMessage("user", first))
            total = 0.0
            while True:
                try:
                    reply = await chat.reply(stop=environment.stop)
                except LimitReached:
                    # Earlier rewards stay credited; the episode is unfinished.
                    return AgentOutcome(reward=0.0, parts={"return": total, "unfinished": 1.0})
                step = await _returned("step", environment.step(reply.text), TextStep)
                reward = finite("reward", step.reward)
                total += reward
                if step.done:
                    parts = {"return": total, "unfinished": 0.0}
                    return AgentOutcome(answer=reply.text, reward=reward, parts=parts)
                if reward:
                    chat.credit(reward)
                chat.add(step.text)
        finally:
            await environment.close()


async def _returned(name: str, result: object, kind: type[T]) -> T:
    """Return the result of a method of the user's environment.

    Raises:
        TypeError: the method is not async, or returned another type.
    """
    what = f"`{name}` of the environment returned"
    if not inspect.isawaitable(result):
        raise TypeError(f"{what} {type(result).__name__} at once: write it with `async def`")
    value = await result
    if not isinstance(value, kind):
        raise TypeError(f"{what} {type(value).__name__}, not `{kind.__name__}`")
    return value


def environment_maker(environment: TextEnvironmentConfig) -> Callable[[], TextEnvironment]:
    """Return a factory of text environments.

    Raises:
        ConfigError: the environment cannot be imported, or a package is missing.
    """
    openenv = environment.settings
    if isinstance(openenv, OpenEnvOptions):
        OpenEnv(openenv)
        return lambda: OpenEnv(openenv)
    if environment.type == "treasure":
        return Treasure
    return cast("Callable[[], TextEnvironment]", import_target(environment.type, "environment"))
