"""An agent with a tool that takes its time: conversations differ in turns, and are the same in every placement."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from typing import Any

# Of a job with agents: turns of a conversation at least and at most, seconds of a call of the tool.
_USUAL = {"turns": (2, 4), "seconds": 0.2}


def _settings() -> Any:
    return json.loads(os.environ["STAND_IN_WORK"]).get("tool", _USUAL)


async def look_up(text: str) -> str:
    """Look nothing up."""
    await asyncio.sleep(_settings()["seconds"])
    return "20 letters of result"


async def converse(task: Any, llm: Any, tools: Any) -> str:
    """Speak as often as the task and the number of the run say, and use the tool in between."""
    least, most = _settings()["turns"]
    turns = least + zlib.crc32(f"{task.prompt}:{llm.settings.sample}".encode()) % (most - least + 1)
    chat = llm.conversation(task.prompt)
    reply = await chat.reply()
    for _ in range(turns - 1):
        chat.add((await tools.call("look_up", task.prompt)).text)
        reply = await chat.reply()
    return reply.text
