"""Agents of others, unchanged, through the endpoint of a run.

`RLINF_FRAMEWORKS_PYTHON` names an interpreter with openai and pydantic-ai: `pip install "pydantic-ai-slim[openai]"` in
an environment of its own.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from recipes.agent.endpoint import ChatEndpoint, serve
from tests.unit.recipes.agent.scripted import model, tokens

PYTHON = os.environ.get("RLINF_FRAMEWORKS_PYTHON", "")
PROGRAM = Path(__file__).with_name("framework_agents.py")
AGENTS = ("openai_client", "pydantic_ai", "pydantic_ai_streams")
CALL = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_FRAMEWORKS_PYTHON names no interpreter with openai and pydantic-ai"),
]


async def agent(name: str, endpoint: ChatEndpoint, token: str | None = None) -> tuple[int, str, str]:
    """Return how an agent's program ended, and what it printed."""
    inputs = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": token or endpoint.api_key}
    process = await asyncio.create_subprocess_exec(
        PYTHON, str(PROGRAM), name, env={**os.environ, **inputs}, stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode().strip(), err.decode()


@pytest.mark.parametrize("name", AGENTS)
async def test_an_unchanged_agent_is_one_trajectory(name: str) -> None:
    llm = model(CALL, "It is 5.")
    async with serve(llm) as endpoint:
        status, out, err = await agent(name, endpoint)
    assert status == 0, err
    assert out == "It is 5."
    (segment,) = llm.segments()
    # What was drawn is learned from, what the function gave is not; nothing was written anew.
    assert segment.tokens == (*tokens(CALL), 0, *tokens("5"), *tokens("It is 5."), 0)
    assert segment.trained == (True,) * (len(CALL) + 1) + (False,) + (True,) * 9
    assert '"name": "add"' in "".join(map(chr, segment.prompt))


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_with_another_tasks_token_gets_nothing(name: str) -> None:
    mine, other = model("secret"), model("another secret")
    async with serve(mine) as endpoint, serve(other) as another:
        status, out, err = await agent(name, endpoint, another.api_key)
    assert status != 0
    assert "401" in err
    assert "secret" not in out + err
    assert (mine.turns, other.turns) == (0, 0)
