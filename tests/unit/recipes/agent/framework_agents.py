"""Agents as people write them with openai and pydantic-ai, which know of no trainer.

The server and its token are those of `OPENAI_BASE_URL` and `OPENAI_API_KEY`. Run by the interpreter that has these
packages, with the agent's name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}}},
    },
}
QUESTION = "How much is 2 and 3?"


def openai_client() -> str:
    """Answer with the client of OpenAI, by streams."""
    import openai

    client, messages = openai.OpenAI(max_retries=0), list[Any]([{"role": "user", "content": QUESTION}])
    while True:
        text, calls = "", dict[int, dict[str, str]]()
        for chunk in client.chat.completions.create(model="policy", messages=messages, tools=[ADD], stream=True):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for item in delta.tool_calls or ():
                part = calls.setdefault(item.index, {"id": "", "name": "", "arguments": ""})
                part["id"] += item.id or ""
                part["name"] += item.function.name or ""
                part["arguments"] += item.function.arguments or ""
        if not calls:
            return text
        entries = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": entries})
        for item in calls.values():
            seen = str(add(**json.loads(item["arguments"])))
            messages.append({"role": "tool", "tool_call_id": item["id"], "content": seen})


def pydantic_ai() -> str:
    """Answer with an agent of pydantic-ai."""
    return _framework_agent().run_sync(QUESTION).output


def pydantic_ai_streams() -> str:
    """Answer with an agent of pydantic-ai, by streams."""

    async def run() -> str:
        async with _framework_agent().run_stream(QUESTION) as result:
            return await result.get_output()

    return asyncio.run(run())


def _framework_agent() -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    return Agent(OpenAIChatModel("policy"), tools=[add])


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
