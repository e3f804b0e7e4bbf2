"""Initial messages of a task's conversation."""

from __future__ import annotations

from typing import cast

from recipes.agent.config import AgentDataConfig
from recipes.agent.conversation.turn_messages import ChatMessage, Role
from recipes.language.data.problems import Problem, require_text


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
    messages = [ChatMessage(cast("Role", message["role"]), message["content"]) for message in written]
    messages[-1] = messages[-1]._replace(text=data.few_shot + messages[-1].text)
    system = "\n\n".join(filter(None, (data.system_prompt, instructions)))
    if system and messages[0].role != "system":
        messages.insert(0, ChatMessage("system", system))
    return tuple(messages)
