"""Example conversations for the supervised warm start of models built from scratch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from recipes.agent.config.agent_config import EPISODES, AgentConfig
from recipes.agent.conversation.turn_messages import ChatMessage, TurnEncoder
from recipes.agent.environments.env_agent import environment_maker
from recipes.agent.environments.text_environment import TextEnvironment
from recipes.agent.tasks.tasks import first_messages, load_tasks, make_tools
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.answers.sequences import undrawn
from recipes.language.data.problems import Problem, training_order
from recipes.language.data.text_tokens import TextTokens
from recipes.training.worker_parts import Purpose, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def conversations(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return `actor.warm_start.steps` batches of conversations on training tasks.

    In at least half of them, tools lead to the right answer; in the others the answer is a guess: that of another task.
    The first turns that are trained on call a tool at the rate `tool_share`.
    """
    data, start = config.data, config.actor.warm_start
    if data.source == EPISODES:
        return _episodes(config, tokenizer)
    tasks = load_tasks(data, evaluation=False)
    tools = Toolbox(make_tools(config), config.agent.tool_timeout)
    writer = _Writer(config, tokenizer)
    chance = random.Random(derive_seed(config.actor.seed, Purpose.WEIGHTS))
    count = start.steps * data.rollout_batch_size
    share = start.tool_share
    # The shares of conversations with tools, and of these with a trained beginning, which all guesses have.
    used = max(0.5, share)
    begun = share * (1 - used) / ((1 - share) * used) if share < 1 else 1.0
    shown: list[Answer] = []
    for index in training_order(len(tasks), 0, count, seed=config.actor.seed, shuffle=True):
        task = tasks[index]
        calls: list[tuple[str, str]] = task.row.get("calls", [])
        # Without the needed tools, only a guess is possible.
        chosen = used if {name for name, _ in calls} <= set(tools.names) else 0.0
        if not calls:
            shown.append(writer.written(task, [(task.answer, True)]))
        elif chance.random() < chosen:
            conversation = writer.written(task, [*asyncio.run(_used(tools, calls)), (task.answer, True)])
            shown.append(
                conversation
                if chance.random() < begun
                else replace(conversation, trained=(False, *conversation.trained[1:]))
            )
        else:
            shown.append(writer.written(task, [(tasks[chance.randrange(len(tasks))].answer, True)]))
    return shown


def _episodes(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return episodes of the environment's example actions at skill `tool_share`; none if it has no examples."""
    settings, start = config.agent.environment, config.actor.warm_start
    make: Any = environment_maker(settings) if settings.type == "treasure" or ":" in settings.type else None
    if getattr(make, "example", TextEnvironment.example) is TextEnvironment.example:
        return []
    tasks, writer = load_tasks(config.data, evaluation=False), _Writer(config, tokenizer)
    chance = random.Random(derive_seed(config.actor.seed, Purpose.WEIGHTS))
    shown: list[Answer] = []
    for seed in range(start.steps * config.data.rollout_batch_size):
        play = _played(make(), seed, chance, start.tool_share, config.agent.max_turns)
        first, turns = asyncio.run(play)
        shown.append(writer.written(replace(tasks[seed], prompt=first), turns))
    return shown


async def _played(
    environment: TextEnvironment, seed: int, chance: random.Random, skill: float, most: int
) -> tuple[str, list[tuple[str, bool]]]:
    """Return the initial text of an environment and the turns of an episode, as `_used` does."""
    try:
        first, turns = await environment.reset(seed), list[tuple[str, bool]]()
        for _ in range(most):
            said = environment.example(chance, skill)
            step = await environment.step(said)
            turns.append((said, True))
            if step.done:
                break
            turns.append((step.text, False))
        return first, turns
    finally:
        await environment.close()


async def _used(tools: Toolbox, calls: Iterable[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Return turns that call tools, and the tools' results: texts, and whether the model is trained on them."""
    turns: list[tuple[str, bool]] = []
    for name, argument in calls:
        turns.append((f"<{name}>{argument}</{name}>", True))
        turns.append((tools.written(await tools.call(name, argument)), False))
    return turns


class _Writer:
    """Writes conversations as tokens."""

    def __init__(self, config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._data = config.data
        self._texts, self._end = TextTokens(tokenizer), cast("Any", tokenizer).eos_token_id
        self._encoder = TurnEncoder(
            tokenizer,
            apply_chat_template=config.data.apply_chat_template,
            template_arguments=config.data.chat_template_kwargs,
        )

    def written(self, task: Problem, turns: Iterable[tuple[str, bool]]) -> Answer:
        prompt = self._encoder.encode((), first_messages(task, self._data, ""))
        tokens: list[int] = []
        trained: list[bool] = []
        for text, learned in turns:
            if learned:
                encoded = tuple(self._texts.behind(text))
            else:
                encoded = self._encoder.encode((*prompt, *tokens), [ChatMessage("tool", text)])
            tokens += encoded
            trained += [learned] * len(encoded)
        return undrawn(prompt, (*tokens, self._end), (*trained, True))
