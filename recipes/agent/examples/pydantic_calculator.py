"""An agent of pydantic-ai with a calculator, and the function that trains it.

`solve` does not depend on training and works with any server.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import re
from typing import Final

from recipes.agent.conversation.agents import AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import serve
from recipes.agent.tools.tool import Toolbox

_CALL: Final = re.compile(r"<calculator>(\d+)\*(\d+)\Z")


async def solve(question: str, base_url: str, api_key: str) -> str:
    """Let the model use the calculator until it answers, and return the answer."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, model_settings={"stop_sequences": ["</calculator>"]})
    result = await agent.run(question)
    while call := _CALL.search(result.output):
        product = int(call[1]) * int(call[2])
        result = await agent.run(f"<result>{product}</result>", message_history=result.all_messages())
    return result.output


async def run(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    """Run the agent on a task with the model in training."""
    async with serve(llm) as endpoint:
        return await solve(task.prompt, endpoint.base_url, endpoint.api_key)
