"""OpenEnv's protocol against a server of our own: `{"type": "reset" | "step", "data": ...}` at `/ws`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from recipes.agent.config.tool_config import OpenEnvKeys
from recipes.agent.environments.openenv import OpenEnv, OpenEnvError
from recipes.agent.environments.text_environment import TextStep
from recipes.agent.tools.tool import ToolUnavailable

websockets = pytest.importorskip("websockets.asyncio.server")


async def _serve(connection: Any) -> None:
    """Play one session: an echo with the length of what was said as its reward; `end` ends it."""
    assert connection.request.path == "/ws"
    seed = None
    async for text in connection:
        message = json.loads(text)
        if message["type"] == "reset":
            seed, observation, reward, done = message["data"]["seed"], {"echo": "hello", "turn": 0}, None, False
        elif set(message["data"]) != {"message"}:
            error = {"message": "an action has a message", "code": "VALIDATION_ERROR"}
            await connection.send(json.dumps({"type": "error", "data": error}))
            continue
        else:
            said = message["data"]["message"]
            observation, reward, done = {"echo": f"{seed} {said}", "turn": 1}, len(said), said == "end"
        data = {"observation": observation, "reward": reward, "done": done}
        await connection.send(json.dumps({"type": "observation", "data": data}))


@asynccontextmanager
async def _server() -> AsyncGenerator[str]:
    async with websockets.serve(_serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _played(action_key: str, observation_key: str | None, *texts: str) -> list[Any]:
    async with _server() as url:
        environment = OpenEnv(OpenEnvKeys(url=url, action_key=action_key, observation_key=observation_key))
        try:
            return [await environment.reset(5), *[await environment.step(text) for text in texts]]
        finally:
            await environment.close()


def test_an_episode() -> None:
    seen = asyncio.run(_played("message", None, "go", "end"))
    assert seen == ["hello", TextStep("5 go", 2.0, False), TextStep("5 end", 3.0, True)]


def test_the_key_of_an_observation() -> None:
    assert asyncio.run(_played("message", "turn", "go")) == ["0", TextStep("1", 2.0, False)]
    with pytest.raises(OpenEnvError, match="no `text`; it has echo, turn"):
        asyncio.run(_played("message", "text"))


def test_what_the_server_refuses() -> None:
    with pytest.raises(OpenEnvError, match="VALIDATION_ERROR: an action has a message"):
        asyncio.run(_played("text", None, "go"))


def test_many_episodes_at_once_have_sessions_of_their_own() -> None:
    async def run() -> list[list[Any]]:
        return await asyncio.gather(*(_played("message", None, str(number)) for number in range(20)))

    assert [item[1].text for item in asyncio.run(run())] == [f"5 {number}" for number in range(20)]


def test_a_server_that_is_not_there_is_no_fault_of_the_model() -> None:
    with pytest.raises(ToolUnavailable, match="does not respond"):
        asyncio.run(OpenEnv(OpenEnvKeys(url="http://127.0.0.1:1")).reset(0))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("no JSON", "not JSON"),
        ("[]", "no `data`"),
        ('{"data": {"observation": {}, "reward": "much"}}', "the reward is 'much'"),
        ('{"data": {"observation": {}, "reward": NaN}}', "the reward is nan"),
        ('{"data": {"observation": {}, "done": "no"}}', "`done` is 'no'"),
        ("", "disconnected"),
    ],
)
def test_a_server_that_speaks_otherwise_is_no_fault_of_the_model(answer: str, why: str) -> None:
    async def act(connection: Any) -> None:
        await connection.recv()
        if answer:
            await connection.send(answer)

    async def run() -> None:
        async with websockets.serve(act, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await OpenEnv(OpenEnvKeys(url=f"ws://127.0.0.1:{port}")).reset(0)

    with pytest.raises(ToolUnavailable, match=why):
        asyncio.run(run())
