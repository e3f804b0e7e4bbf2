"""Messages between agents and engines."""

from __future__ import annotations

from typing import Literal, NamedTuple

from recipes.agent.call_forms import CallForm, FunctionCall
from recipes.language.answers.sequences import FinishReason

Role = Literal["system", "user", "assistant", "tool"]


class ChatMessage(NamedTuple):
    """A message of a chat.

    Attributes:
        role, text: the role and text of the message.
        calls: the calls of functions, in a message of the assistant that the model did not draw.
        call_id: the id of the call that a tool's message answers.
        name: the name of that function, or of the person who writes.
    """

    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""
    name: str = ""


class ToolOffer(NamedTuple):
    """Functions that the model may call in a conversation.

    Attributes:
        functions: each as chat completions list it, as JSON.
        instructions: how to call them, for the system message, where the chat template does not say.
        single: whether a turn ends after one call.
    """

    functions: tuple[str, ...]
    instructions: str
    single: bool = False


class DrawRequest(NamedTuple):
    """A turn that an engine is to draw.

    Attributes:
        request_id: comes back with the turn; given by the process that asks.
        agent: rank of the process that asks.
        context: tokens of the conversation so far.
        messages: the messages that follow them; the engine renders them as tokens.
        max_tokens: the maximum tokens of the conversation, this turn included.
        max_new_tokens: the most new tokens of this turn; 0: the messages are counted, and nothing is drawn.
        temperature: the temperature of the draws; 0 takes the likeliest token.
        seed: the seed of the draws.
        sample: number of the draws, which distinguishes equal conversations.
        version: the version of the oldest weights that may draw the turn.
        stop: texts that end the turn, besides the model's own end.
        tools: the tools that the model may call.
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
    tools: ToolOffer | None = None


class DrawnTurn(NamedTuple):
    """A turn that an engine drew.

    Attributes:
        request_id: the id of the request.
        observed: tokens of the messages, which come before those drawn.
        tokens: token ids, the one that ends the turn included; none where the conversation has no room for any.
        logprobs: the log-probabilities of each.
        versions: the versions of the weights that drew each.
        text: the text, without the token that ends the turn.
        finish: why the turn ended.
        raw: text with tokens that have no meaning as text, where calls may stand among those; empty: `text`.
        form: the form of calls, where the chat template teaches one.
        thinking: whether the turn begins within a thought, which the prompt opens.
        refusal: why the messages cannot be written; there are no tokens then.
        failure: why the engine has not drawn it; there are no tokens then.
    """

    request_id: int
    observed: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: FinishReason
    raw: str = ""
    form: CallForm | None = None
    thinking: bool = False
    refusal: str = ""
    failure: str = ""


def engine_key(rank: int) -> str:
    """Return the channel key of turn requests to an engine."""
    return f"turns:{rank}"


def agent_key(rank: int) -> str:
    """Return the key under which an agent process gets them."""
    return f"drawn:{rank}"
