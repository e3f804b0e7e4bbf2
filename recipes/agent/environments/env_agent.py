"""The agent that plays a text environment: model turns are actions, environment texts are input."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.config.tool_config import HarborKeys, OpenEnvKeys, TextEnvironmentConfig, VerifiersKeys
from recipes.agent.conversation.agents import Agent, AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel, LimitReached
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.environments.openenv import OpenEnv
from recipes.agent.environments.text_environment import TextEnvironment, Treasure
from recipes.agent.tools.toolbox import Toolbox
from rlinf_core.registry import import_target


class EnvAgent:
    """Plays an episode in each run; the seed is that of the task.

    The reward of the last turn is that of the outcome; that of an earlier one is credited to its turn.

    Args:
        make: makes an environment.
    """

    def __init__(self, make: Callable[[], TextEnvironment]) -> None:
        self._make = make

    async def __call__(self, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
        """Play, and return the outcome; an agent as `Agent` says."""
        environment = self._make()
        try:
            first = await environment.reset(int(task.row.get("seed", 0)))
            before = [message for message in task.messages if message.role == "system"]
            chat = llm.conversation(*before, ChatMessage("user", first))
            total = 0.0
            while True:
                try:
                    reply = await chat.reply(stop=environment.stop)
                except LimitReached:
                    # What was gained stays; the episode has no end.
                    return AgentOutcome(reward=0.0, parts={"return": total, "unfinished": 1.0})
                step = await environment.step(reply.text)
                total += step.reward
                if step.done:
                    parts = {"return": total, "unfinished": 0.0}
                    return AgentOutcome(answer=reply.text, reward=step.reward, parts=parts)
                if step.reward:
                    chat.credit(step.reward)
                chat.add(step.text)
        finally:
            await environment.close()


def make_env_agent(config: AgentConfig) -> Agent:
    """Return the agent that plays the environment of a job.

    Raises:
        ConfigError: the environment cannot be imported, or a package is missing.
    """
    settings: object = config.agent.environment
    if isinstance(settings, VerifiersKeys):
        # For the processes that play it: it imports much.
        from recipes.agent.environments.verifiers_agent import VerifiersAgent

        return VerifiersAgent(settings, config.data.val_size)
    if isinstance(settings, HarborKeys):
        from recipes.agent.environments.harbor_agent import TaskAgent

        return TaskAgent(config, settings)
    return EnvAgent(environment_maker(config.agent.environment))


def environment_maker(settings: TextEnvironmentConfig) -> Callable[[], TextEnvironment]:
    """Return a factory of text environments.

    Raises:
        ConfigError: it cannot be imported, or a package is missing.
    """
    openenv: object = settings
    if isinstance(openenv, OpenEnvKeys):
        OpenEnv(openenv)
        return lambda: OpenEnv(openenv)
    if settings.type == "treasure":
        return Treasure
    return cast("Callable[[], TextEnvironment]", import_target(settings.type, "environment"))
