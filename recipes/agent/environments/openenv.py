"""Environments of OpenEnv servers, over their WebSocket: a session for each episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from recipes.agent.environments.text_environment import TextEnvironment, TextStep
from rlinf_core import ConfigError
from rlinf_core.process.requirements import install_command, missing_modules

_LARGEST_MESSAGE: Final = 16 << 20


class OpenEnvError(Exception):
    """An answer of a server that says that it failed, or is none of its protocol."""


class OpenEnvSettings(NamedTuple):
    """The server, and where texts stand in its messages.

    Attributes:
        url: of the server, `http://HOST:PORT` or `ws://HOST:PORT`.
        action_key: key of an action that holds the model's text.
        observation_key: key of an observation that holds what the model is told; None: its only text, or all of it as
            JSON.
    """

    url: str
    action_key: str
    observation_key: str | None


class OpenEnv(TextEnvironment):
    """An episode of an OpenEnv server.

    Raises:
        ConfigError: the package websockets is missing.
    """

    def __init__(self, settings: OpenEnvSettings) -> None:
        if missing_modules(["websockets"]):
            raise ConfigError("`openenv` needs the package websockets", help=f"run `{install_command('websockets')}`")
        self._settings = settings
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        """See `TextEnvironment`.

        Raises:
            OSError: the server is not there.
            OpenEnvError: it cannot begin the episode.
        """
        client: Any = import_module("websockets.asyncio.client")
        url = (
            self._settings.url.replace("http", "ws", 1) if self._settings.url.startswith("http") else self._settings.url
        )
        self._socket = await client.connect(f"{url.rstrip('/')}/ws", max_size=_LARGEST_MESSAGE, proxy=None)
        return (await self._answer("reset", {"seed": seed})).text

    async def step(self, text: str) -> TextStep:
        """See `TextEnvironment`.

        Raises:
            OpenEnvError: the server refuses the action.
        """
        return await self._answer("step", {self._settings.action_key: text})

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> TextStep:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer: Any = json.loads(await self._socket.recv())
        if not isinstance(answer, dict) or not isinstance(cast("dict[str, Any]", answer).get("data"), dict):
            raise OpenEnvError("the server does not speak as OpenEnv does")
        found = cast("dict[str, Any]", answer)
        data = cast("dict[str, Any]", found["data"])
        if found.get("type") == "error":
            raise OpenEnvError(f"{data.get('code', 'error')}: {data.get('message', '')}")
        return TextStep(self._text(data.get("observation")), float(data.get("reward") or 0.0), bool(data.get("done")))

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            return str(observation or "")
        fields = cast("dict[str, Any]", observation)
        key = self._settings.observation_key
        if key is not None:
            if key not in fields:
                raise OpenEnvError(f"an observation has no `{key}`; it has {', '.join(fields)}")
            return str(fields[key])
        texts = [each for each in fields.values() if isinstance(each, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)
