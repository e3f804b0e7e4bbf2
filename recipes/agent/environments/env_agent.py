"""The agent that plays a text environment: model turns are actions, environment texts are input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar, cast

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.config.tool_config import HarborOptions, OpenEnvOptions, TextEnvironmentConfig, VerifiersOptions
from recipes.agent.conversation.agents import Agent, AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel, LimitReached
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.environments.openenv import OpenEnv
from recipes.agent.environments.text_environment import TextEnvironment, TextStep, Treasure
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.rewards.functions import finite
from rlinf_core.registry import import_target

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


def make_env_agent(config: AgentConfig) -> Agent:
    """Return the agent that plays a job's environment.

    Raises:
        ConfigError: the environment cannot be imported, or a package is missing.
    """
    settings = config.agent.environment.settings
    if isinstance(settings, VerifiersOptions):
        # Imported only where needed, as it imports much.
        from recipes.agent.environments.verifiers_agent import VerifiersAgent

        return VerifiersAgent(settings, config.data.val_size)
    if isinstance(settings, HarborOptions):
        from recipes.agent.environments.harbor_agent import TaskAgent

        return TaskAgent(config, settings)
    return EnvAgent(environment_maker(config.agent.environment))


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
