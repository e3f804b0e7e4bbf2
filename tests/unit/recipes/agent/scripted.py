"""Engines that say what a test has written, and conversations with them."""

from __future__ import annotations

import asyncio
from typing import Any

from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel
from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest

SETTINGS = DrawSettings(sample=2, seed=5, temperature=1.0, max_turns=4, max_tokens=40, max_new_tokens=10)


class Script:
    """Engines whose token ids are those of characters; a turn ends with 0. `known` is what a worker knows besides."""

    def __init__(self, *turns: str, **known: Any) -> None:
        self._turns = list(turns)
        self._known = known
        self.requests: list[DrawRequest] = []

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        self.requests.append(request)
        await asyncio.sleep(0)
        observed = tuple(ord(item) for message in request.messages for item in message.text)
        room = request.max_tokens - len(request.context) - len(observed)
        if room < 1:
            return DrawnTurn(0, (), (), (), (), "", "length")
        text = self._turns.pop(0)
        ends = any(text.endswith(item) for item in request.stop)
        drawn = tokens(text) + (() if ends else (0,))
        turn = DrawnTurn(0, observed, drawn, (-1.0,) * len(drawn), (3,) * len(drawn), text, "stop")
        return turn._replace(**self._known)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def model(*turns: str, **settings: Any) -> LanguageModel:
    """Return a model with room for long conversations; `settings` are of the draws, or known of the turns."""
    changed = {name: settings.pop(name) for name in list(settings) if name in DrawSettings._fields}
    changes = {"max_tokens": 4000, "max_new_tokens": 1000, **changed}
    return LanguageModel(Script(*turns, **settings), SETTINGS._replace(**changes))
