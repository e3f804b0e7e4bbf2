"""Environments of OpenEnv servers, with one WebSocket session per episode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, cast

from recipes.agent.config.tool_config import OpenEnvOptions
from recipes.agent.environments.text_environment import TextEnvironment, TextStep
from recipes.agent.tools.tool import CallLost, ToolUnavailable
from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.process.requirements import install_command, missing_modules

_LARGEST_MESSAGE: Final = 16 << 20


class OpenEnvError(Exception):
    """An error response of an OpenEnv server."""


class OpenEnv(TextEnvironment):
    """An episode of an OpenEnv server.

    Raises:
        ConfigError: the package websockets is missing.
    """

    def __init__(self, settings: OpenEnvOptions) -> None:
        if missing_modules(["websockets"]):
            raise ConfigError("`openenv` needs the package websockets", help=f"run `{install_command('websockets')}`")
        self._settings = settings
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        """See `TextEnvironment`.

        Raises:
            ToolUnavailable: the server does not respond, or violates the protocol.
            OpenEnvError: the server cannot begin the episode.
        """
        client: Any = import_module("websockets.asyncio.client")
        url = (
            self._settings.url.replace("http", "ws", 1) if self._settings.url.startswith("http") else self._settings.url
        )
        try:
            self._socket = await client.connect(f"{url.rstrip('/')}/ws", max_size=_LARGEST_MESSAGE, proxy=None)
        except (OSError, _library_error()) as error:
            raise ToolUnavailable(f"the OpenEnv server {self._settings.url} does not respond: {error}") from None
        return (await self._answer("reset", {"seed": seed})).text

    async def step(self, text: str) -> TextStep:
        """See `TextEnvironment`.

        Raises:
            CallLost: the server disconnected, or violates the protocol.
            OpenEnvError: the server rejects the action.
        """
        return await self._answer("step", {self._settings.action_key: text})

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> TextStep:
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer: Any = load_json(await self._socket.recv(), non_finite=True)
        except (OSError, _library_error()) as error:
            raise CallLost(f"the OpenEnv server {self._settings.url} disconnected: {error}") from None
        except ValueError:
            raise self._stranger("a response is not JSON") from None
        message = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if not isinstance(message.get("data"), dict):
            raise self._stranger("a response has no `data`")
        fields = cast("dict[str, Any]", message["data"])
        if message.get("type") == "error":
            raise OpenEnvError(f"{fields.get('code', 'error')}: {fields.get('message', '')}")
        reward, done = fields.get("reward"), fields.get("done")
        if not isinstance(reward, int | float | None) or not math.isfinite(reward or 0.0):
            raise self._stranger(f"the reward is {reward!r}, not a number")
        if not isinstance(done, bool | None):
            raise self._stranger(f"`done` is {done!r}, neither true nor false")
        return TextStep(self._text(fields.get("observation")), float(reward or 0.0), bool(done))

    def _stranger(self, why: str) -> ToolUnavailable:
        return CallLost(f"the server {self._settings.url} violates the OpenEnv protocol: {why}")

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            return _written(observation)
        fields = cast("dict[str, Any]", observation)
        key = self._settings.observation_key
        if key is not None:
            if key not in fields:
                raise OpenEnvError(f"an observation has no `{key}`; it has {', '.join(fields)}")
            return _written(fields[key])
        texts = [field for field in fields.values() if isinstance(field, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)


def _written(value: Any) -> str:
    """Return a part of an observation as a text: JSON if it is none, and "" for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _library_error() -> type[Exception]:
    """Return the base class of the exceptions of `websockets`."""
    return import_module("websockets.exceptions").WebSocketException
