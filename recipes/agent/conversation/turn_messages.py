"""Messages between agents and engines."""

from __future__ import annotations

from typing import Literal, NamedTuple

from recipes.language.answers.sequences import FinishReason

Role = Literal["system", "user", "assistant", "tool"]


class ChatMessage(NamedTuple):
    """A message of a chat."""

    role: Role
    text: str


class DrawRequest(NamedTuple):
    """A turn that an engine is to draw.

    Attributes:
        request_id: comes back with the turn; given by the process that asks.
        agent: rank of the process that asks.
        context: tokens of the conversation so far.
        messages: what the model is told after them; the engine writes it as tokens.
        max_tokens: of the conversation, this turn included.
        max_new_tokens: of this turn.
        temperature: of the draws; 0 takes the likeliest token.
        seed: of the draws.
        sample: number of the draws, which tells equal conversations apart.
        version: of the oldest weights that may draw the turn.
        stop: texts that end the turn, besides the model's own end.
    """

    request_id: int
    agent: int
    context: tuple[int, ...]
    messages: tuple[ChatMessage, ...]
    max_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int
    sample: int
    version: int = 0
    stop: tuple[str, ...] = ()


class DrawnTurn(NamedTuple):
    """A turn that an engine drew.

    Attributes:
        request_id: of the request.
        observed: tokens of the messages, which come before those drawn.
        tokens: token ids, the one that ends the turn included; none where the conversation has no room for any.
        logprobs: of each.
        versions: of the weights that drew each.
        text: without the token that ends the turn.
        finish: why the turn ended.
    """

    request_id: int
    observed: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: FinishReason


def engine_key(rank: int) -> str:
    """Return the key under which an engine is asked for turns."""
    return f"turns:{rank}"


def agent_key(rank: int) -> str:
    """Return the key under which an agent process gets them."""
    return f"drawn:{rank}"
