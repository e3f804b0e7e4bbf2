"""Requests, responses and conversations that all protocols of the endpoint share."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, cast

from recipes.agent.conversation.call_forms import HERMES, FunctionCall, find_calls, hermes_instructions
from recipes.agent.conversation.chat_model import (
    Chat,
    DrawSettings,
    EngineUnavailable,
    LanguageModel,
    LimitReached,
    MessagesRefused,
    ModelReply,
)
from recipes.agent.conversation.turn_messages import ChatMessage, Role, ToolOffer
from recipes.language.loopback_server import RequestError, bad_request
from recipes.language.text.chat_messages import object_of
from rlinf_core.foreign.strict_json import BadJsonError

_NO_SCHEMAS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})


class Ask(NamedTuple):
    """A request for the model's next turn.

    Attributes:
        messages: the messages of the conversation, with the assistant's as the model wrote them.
        offer: the functions described to the model.
        callable: JSON Schemas of the arguments of functions that the model may call now, by name.
        stop: the texts that end the turn.
        most: the maximum tokens of the turn; None: the run's limit.
        model: the model's name in the response.
        streams: whether the response is a stream.
        answers: the number of turns to sample, each in its own conversation.
    """

    messages: tuple[ChatMessage, ...]
    offer: ToolOffer | None = None
    callable: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS
    stop: tuple[str, ...] = ()
    most: int | None = None
    model: str = "policy"
    streams: bool = False
    answers: int = 1


class SaidTurn(NamedTuple):
    """A turn of the model in the form for clients.

    Attributes:
        text: the text, without calls, and without the text that ended the turn.
        calls: the calls of the client's functions.
        finish: the finish reason of the turn.
        stop: the text that ended the turn; None: another reason.
        prompt_tokens, tokens: the numbers of tokens before and in the turn.
    """

    text: str
    calls: tuple[FunctionCall, ...]
    finish: Literal["stop", "length", "calls"]
    stop: str | None
    prompt_tokens: int
    tokens: int


class _CallingTurn(NamedTuple):
    """A turn of the model with calls: its raw text, and the text and calls that the client got."""

    written: str
    text: str
    calls: tuple[FunctionCall, ...]


def _values(calls: Sequence[FunctionCall]) -> list[tuple[str, str, object]]:
    """Return the ids, names and arguments of calls."""
    return [(call.call_id, call.name, object_of(call.arguments)) for call in calls]


class Chats:
    """The conversations of a run, found by their messages.

    Attributes:
        settings: the settings of all turns of the run.
        responses: input and output of earlier responses by id, for the protocol that continues them.
    """

    def __init__(self, llm: LanguageModel) -> None:
        self._llm = llm
        self._known: dict[tuple[tuple[str, ...], tuple[ChatMessage, ...]], Chat] = {}
        # Turns with calls, by id of each call, as clients send back only the parsed calls.
        self._called: dict[str, _CallingTurn] = {}
        self.settings: DrawSettings = llm.settings
        self.responses: dict[str, list[Any]] = {}

    async def reply(self, ask: Ask) -> list[SaidTurn]:
        """Return the next turns of a conversation.

        Raises:
            RequestError: a limit of the run is reached, the chat template refuses the messages, or the engine failed.
        """
        chat, past = self._begun(ask)
        answered = False
        try:
            if ask.answers > self.settings.max_turns - self._llm.turns:
                raise self._llm.reached("turns")
            branches = [chat, *(chat.fork() for _ in range(ask.answers - 1))]
            replies = await asyncio.gather(*(branch.reply(ask.stop, ask.most) for branch in branches))
            answered = True
        except LimitReached as limit:
            # Clients retry after this status automatically, unless configured otherwise.
            message = f"this task has no {limit.limit} left"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"x-should-retry": "false"}) from None
        except MessagesRefused as refusal:
            raise bad_request(f"the model's chat template rejects the messages: {refusal}") from None
        except EngineUnavailable as lost:
            # The run has failed anyway, so another try is useless.
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(lost), {"x-should-retry": "false"}) from None
        finally:
            # Restore the conversation if the request failed.
            if not answered and past is not None:
                chat.pending.clear()
                self._known[past] = chat
        return [self._answer(ask, *branch_and_reply) for branch_and_reply in zip(branches, replies, strict=True)]

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens of a request's messages.

        Raises:
            RequestError: the chat template refuses the messages.
        """
        try:
            return await self._llm.count(ask.messages, ask.offer)
        except MessagesRefused as refusal:
            raise bad_request(f"the model's chat template rejects the messages: {refusal}") from None

    def written(self, text: str, calls: Sequence[FunctionCall]) -> str | None:
        """Return the raw text of the model's turn with a text and calls; None if the model wrote no such turn.

        Clients may leave out the text, and write the arguments in another way.
        """
        turn = self._called.get(calls[0].call_id)
        if turn is None or text.strip() not in ("", turn.text.strip()) or _values(calls) != _values(turn.calls):
            return None
        return turn.written

    def _begun(self, ask: Ask) -> tuple[Chat, Any]:
        """Return the conversation that a request continues, and its key; or a new conversation, and None."""
        functions = ask.offer.functions if ask.offer else ()
        for count in range(len(ask.messages) - 1, 0, -1):
            # Remove it, so that a second request with the same past becomes a separate branch.
            past = (functions, ask.messages[:count])
            chat = self._known.pop(past, None)
            if chat is not None:
                chat.tools = ask.offer
                for message in ask.messages[count:]:
                    chat.add(message)
                return chat, past
        return self._llm.conversation(*ask.messages, tools=ask.offer), None

    def _answer(self, ask: Ask, chat: Chat, reply: ModelReply) -> SaidTurn:
        ends = [(reply.text.find(text), text) for text in ask.stop if text in reply.text]
        place, stop = min(ends, default=(len(reply.text), None))
        if stop is None:
            # The stop text may consist of special tokens, which the turn's text lacks.
            stop = next((text for text in ask.stop if text in reply.raw), None)
        text, calls, written = reply.text[:place], (), reply.text[:place]
        if ask.callable:
            before, calls = find_calls(reply.raw, reply.form or HERMES, ask.callable, thinking=reply.thinking)
            if calls:
                calls = calls[:1] if ask.offer and ask.offer.single else calls
                text, stop, written = before, None, reply.raw
        functions = ask.offer.functions if ask.offer else ()
        self._known[functions, (*ask.messages, ChatMessage("assistant", written))] = chat
        self._called.update((call.call_id, _CallingTurn(written, text, calls)) for call in calls)
        finish = "calls" if calls else "length" if reply.finish == "length" else "stop"
        return SaidTurn(text, calls, finish, stop, reply.prompt_tokens, len(reply.tokens))


class Functions(NamedTuple):
    """Functions of a request: those listed to the model, and the schemas of those it may call."""

    offer: ToolOffer | None
    callable: Mapping[str, Mapping[str, Any]]


def parse_functions(described: Sequence[Mapping[str, Any]], *, may_call: bool, single: bool) -> Functions:
    """Parse the functions of a request.

    Args:
        described: the functions, each with `name`, `description` and `parameters`.
        may_call: whether the model may call functions in this turn.
        single: whether a turn may have only one call.

    Raises:
        RequestError: a name is missing or repeated, or parameters are not a JSON Schema of an object.
    """
    entries: list[dict[str, Any]] = []
    schemas: dict[str, Mapping[str, Any]] = {}
    for function in described:
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name or name in schemas:
            raise bad_request("every entry of `tools` must be a function with a unique `name`")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_request(f"the parameters of the function `{name}` must be a JSON Schema of an object")
        schemas[name] = cast("dict[str, Any]", parameters or {})
        kept = {key: value for key, value in function.items() if key != "strict" and value is not None}
        entries.append({"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **kept}})
    if not entries:
        return Functions(None, _NO_SCHEMAS)
    texts = tuple(json.dumps(entry, ensure_ascii=False) for entry in entries)
    offer = ToolOffer(texts, hermes_instructions(entries), single)
    return Functions(offer, schemas if may_call else _NO_SCHEMAS)


class Transcript:
    """The calls in a request's messages, by which results of functions are matched.

    Args:
        chats: the conversations of the run.
    """

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self._names: dict[str, str] = {}

    def call(self, name: Any, arguments: Any, call_id: Any) -> FunctionCall:
        """Record and return a call of a message, whose arguments are an object or its JSON text.

        Raises:
            RequestError: the name or id is not text.
        """
        if not (isinstance(name, str) and name and isinstance(call_id, str) and call_id):
            raise bad_request("a call of a function needs a name and an id, which are texts")
        self._names[call_id] = name
        written = isinstance(arguments, str) and arguments.strip()
        return FunctionCall(name, arguments if written else json.dumps(arguments or {}, ensure_ascii=False), call_id)

    def calling(self, text: str, calls: Sequence[FunctionCall]) -> ChatMessage:
        """Return a message with calls, as raw text if the model wrote it and the client did not change it.

        Raises:
            RequestError: the arguments of a call are not a JSON object, or two calls have one id.
        """
        for call_id, count in Counter(call.call_id for call in calls).items():
            if count > 1:
                raise bad_request(f"{count} calls of one message have the id `{call_id}`")
        for call in calls:
            with suppress(BadJsonError):
                if object_of(call.arguments) is not None:
                    continue
            raise bad_request(f"the arguments of the call of `{call.name}` are not a JSON object")
        written = self._chats.written(text, calls)
        return ChatMessage("assistant", text, tuple(calls)) if written is None else ChatMessage("assistant", written)

    def result(self, call_id: Any, text: str, *, field: str) -> ChatMessage:
        """Return the message with the result of a call.

        Raises:
            RequestError: no earlier message has such a call.
        """
        if not isinstance(call_id, str) or call_id not in self._names:
            shown = f"`{call_id}`" if isinstance(call_id, str) else "missing"
            raise bad_request(f"the `{field}` of a function's result is {shown}: no call before it has this id")
        return ChatMessage("tool", text, call_id=call_id, name=self._names[call_id])


ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def event(data: Any, name: str | None = None) -> str:
    """Return an event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"
