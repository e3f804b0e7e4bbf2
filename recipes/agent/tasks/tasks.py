"""Generated tasks with their first messages, and the corpus of the lookup tasks."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from recipes.agent.call_forms import FunctionCall
from recipes.agent.config.agent_config import EPISODES, AgentDataConfig
from recipes.agent.conversation.turn_messages import ChatMessage, Role
from recipes.language.config.problem_config import MOST_GENERATED
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problems import Problem, ProblemSet, require_text

T = TypeVar("T")

# Persons, and the towns and rivers that they are led to.
_PERSONS: Final = 400
_PLACES: Final = 80
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class MadeTasks:
    """Generated tasks."""

    def __init__(self, tasks: list[Problem]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Problem:
        return self._tasks[index]


class Episodes:
    """Seeds of an environment; evaluation seeds are held out from training.

    Args:
        evaluation: whether those of evaluation are asked for.
        size: the number of tasks.
    """

    def __init__(self, *, evaluation: bool, size: int) -> None:
        self._first, self._size = (MOST_GENERATED, size) if evaluation else (0, MOST_GENERATED)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:
        seed = self._first + index
        return Problem(prompt=f"episode {seed}", answer="", row={"seed": seed}, source=EPISODES)


def load_tasks(data: AgentDataConfig, *, evaluation: bool) -> ProblemSet:
    """Return the tasks of training or of evaluation.

    Raises:
        ConfigError: see `load_problems`.
    """
    if data.source == EPISODES:
        return Episodes(evaluation=evaluation, size=data.val_size)
    if data.source == "calculations":
        return MadeTasks(calculations(evaluation=evaluation, size=data.val_size, seed=data.seed))
    if data.source == "lookups":
        return MadeTasks(lookups(evaluation=evaluation, size=data.val_size, seed=data.seed))
    return load_problems(data, evaluation=evaluation)


def calculations(*, evaluation: bool, size: int, seed: int) -> list[Problem]:
    """Return products of two two-digit numbers, written `12*34=`; those of evaluation are held out from training.

    Args:
        evaluation: whether those of evaluation are asked for.
        size: the number of tasks, at most half of all.
        seed: the seed of the split.
    """
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(f"calculations {seed}").shuffle(pairs)
    return [
        Problem(
            prompt=f"{first}*{second}=",
            answer=str(first * second),
            row={"calls": [["calculator", f"{first}*{second}"]]},
            source="calculations",
        )
        for first, second in _part(pairs, evaluation, size)
    ]


def lookups(*, evaluation: bool, size: int, seed: int) -> list[Problem]:
    """Return questions for the river at the home of a person, written `river home kobu?`, which take two look-ups.

    Persons of evaluation are not trained on. Arguments as for `calculations`.
    """
    homes, rivers = _facts(seed)
    return [
        Problem(
            prompt=f"river home {person}?",
            answer=rivers[homes[person]],
            row={"calls": [["search", f"home {person}"], ["search", f"river {homes[person]}"]]},
            source="lookups",
        )
        for person in _part(list(homes), evaluation, size)
    ]


def lookup_corpus(seed: int) -> list[str]:
    """Return the documents in which the answers of `lookups` are found, one fact each."""
    homes, rivers = _facts(seed)
    documents = [f"home {person} {town}" for person, town in homes.items()]
    return documents + [f"river {town} {river}" for town, river in rivers.items()]


def _facts(seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the home of each person, and the river of each town; all names differ."""
    names = ["".join(letters) for letters in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS)]
    chance = random.Random(f"lookups {seed}")
    chance.shuffle(names)
    persons, rest = names[:_PERSONS], names[_PERSONS:]
    towns, rivers = rest[:_PLACES], rest[_PLACES : 2 * _PLACES]
    return {person: chance.choice(towns) for person in persons}, dict(zip(towns, rivers, strict=True))


def _part(every: list[T], evaluation: bool, size: int) -> list[T]:
    held = min(size, len(every) // 2)
    return every[:held] if evaluation else every[held:]


def first_messages(task: Problem, data: AgentDataConfig, instructions: str) -> tuple[ChatMessage, ...]:
    """Return the initial messages of a task's conversation.

    Args:
        task: the problem.
        data: says how it is written.
        instructions: how tools are used; included where the chat template takes a system message.

    Raises:
        ConfigError: the problem is messages, and there is no chat template to write them in.
    """
    if not data.apply_chat_template:
        require_text(task)
        return (ChatMessage("user", data.few_shot + task.prompt),)
    written = task.messages or ({"role": "user", "content": task.prompt},)
    messages = [row_message(message) for message in written]
    messages[-1] = messages[-1]._replace(text=data.few_shot + messages[-1].text)
    system = "\n\n".join(filter(None, (data.system_prompt, instructions)))
    if system and messages[0].role != "system":
        messages.insert(0, ChatMessage("system", system))
    return tuple(messages)


def row_message(message: Mapping[str, Any]) -> ChatMessage:
    """Return a message of a row, as `read_messages` does, as one of a conversation."""
    calls: list[Any] = message.get("tool_calls", [])
    return ChatMessage(
        cast("Role", message["role"]),
        message["content"],
        tuple(_row_call(call.get("id", ""), call.get("function", call)) for call in calls),
        str(message.get("tool_call_id", "")),
        str(message.get("name", "")),
    )


def _row_call(call_id: object, function: Mapping[str, Any]) -> FunctionCall:
    return FunctionCall(function["name"], json.dumps(function["arguments"], ensure_ascii=False), str(call_id))
