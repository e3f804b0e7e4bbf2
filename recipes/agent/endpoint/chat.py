"""The protocol of OpenAI's chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from recipes.agent.conversation.call_forms import FunctionCall
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.endpoint.chats import ROLES, Ask, Chats, SaidTurn, Transcript, event, parse_functions
from recipes.agent.endpoint.fields import (
    answers_field,
    check_fields,
    check_sampling,
    content_text,
    flag,
    listed,
    object_field,
    stop_texts,
    text_field,
    whole_number,
)
from recipes.language.loopback_server import bad_request

_PARTS: Final = {"text": "text", "refusal": "refusal"}
_READ: Final = (
    *("messages", "model", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options"),
    *("tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "seed"),
)
_IGNORED: Final = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "prompt_cache_retention",
)
# Fields that may have only this value.
_FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "response_format": ({"type": "text"}, "the model writes plain text; describe the format in a message"),
    "logprobs": (False, "log-probabilities are used by the run and not returned"),
    "top_logprobs": (0, "log-probabilities are used by the run and not returned"),
    "logit_bias": ({}, "the model learns from its own samples"),
    "presence_penalty": (0, "the model learns from its own samples"),
    "frequency_penalty": (0, "the model learns from its own samples"),
    "modalities": (["text"], "the model writes only text"),
    "functions": ([], "write `tools`"),
    "function_call": ("auto", "use `tools` and `tool_choice`"),
    "reasoning_effort": (None, "reasoning effort is not supported; `data.chat_template_kwargs` may turn thinking off"),
}
# OpenAI's types of errors, by status.
_ERRORS: Final = {401: "authentication_error", 429: "rate_limit_error"}


def read(request: dict[str, Any], chats: Chats) -> Ask:
    """Parse a request.

    Raises:
        RequestError: the request is invalid, or asks for something unsupported.
    """
    check_fields(request, _READ, _IGNORED, _FIXED)
    check_sampling(request, chats.settings)
    flag(object_field(request, "stream_options"), "include_usage")
    choice: Any = request.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_request("`tool_choice` must be `auto` or `none` here: the model chooses")
    tools = listed(request.get("tools") or [], "tools")
    if any(tool.get("type") != "function" for tool in tools):
        raise bad_request("an entry of `tools` must be `type: function` with a `function`")
    functions = parse_functions(
        [object_field(tool, "function") for tool in tools],
        may_call=choice != "none",
        single=not flag(request, "parallel_tool_calls", default=True),
    )
    longer, shorter = whole_number(request, "max_completion_tokens"), whole_number(request, "max_tokens")
    if None not in (longer, shorter) and longer != shorter:
        raise bad_request("`max_completion_tokens` and `max_tokens` are different limits: write one of them")
    transcript = Transcript(chats)
    messages = tuple(_message(message, transcript) for message in listed(request.get("messages"), "messages"))
    if not messages:
        raise bad_request("`messages` must be a list of at least one message")
    return Ask(
        messages,
        functions.offer,
        functions.callable,
        stop_texts(request, "stop"),
        longer if longer is not None else shorter,
        text_field(request, "model", "policy"),
        flag(request, "stream"),
        answers_field(request),
    )


def _message(message: dict[str, Any], transcript: Transcript) -> ChatMessage:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise bad_request("a message needs a `role`: system, developer, user, assistant or tool")
    content, calls = message.get("content"), listed(message.get("tool_calls") or [], "tool_calls")
    if message.get("function_call") is not None:
        raise bad_request("`function_call` of a message is not supported here: write `tool_calls`")
    if role != "assistant":
        text = content_text(content, _PARTS)
        if role == "tool":
            return transcript.result(message.get("tool_call_id"), text, field="tool_call_id")
        return ChatMessage(role, text, name=text_field(message, "name", ""))
    # A refusal, or a message of calls alone, has no content.
    text = content_text(content, _PARTS) if content is not None else text_field(message, "refusal", "")
    if not calls:
        return ChatMessage(role, text)
    return transcript.calling(text, [_call(call, transcript) for call in calls])


def _call(entry: dict[str, Any], transcript: Transcript) -> FunctionCall:
    function = object_field(entry, "function")
    return transcript.call(function.get("name"), function.get("arguments"), entry.get("id"))


def written(
    request: dict[str, Any], ask: Ask, answers: Sequence[SaidTurn], chats: Chats
) -> dict[str, Any] | Iterator[str]:
    """Return a chat completion, or the events of a stream."""
    if ask.streams:
        return _events(request, ask, answers)
    choices = [
        {"index": number, "message": _shown(answer), "logprobs": None, "finish_reason": _finish(answer)}
        for number, answer in enumerate(answers)
    ]
    return {**_common(ask, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def _events(request: dict[str, Any], ask: Ask, answers: Sequence[SaidTurn]) -> Iterator[str]:
    """Yield the events of a stream, with each turn in one piece."""
    common = _common(ask, "chat.completion.chunk")
    counts = flag(object_field(request, "stream_options"), "include_usage")
    # Chunks before the last have a null `usage`.
    pending: dict[str, Any] = {"usage": None} if counts else {}
    nothing: dict[str, str] = {}
    for number, answer in enumerate(answers):
        delta = _shown(answer)
        if answer.calls:
            delta["tool_calls"] = [{"index": place, **call.entry()} for place, call in enumerate(answer.calls)]
        for part, finish in ((delta, None), (nothing, _finish(answer))):
            choice = {"index": number, "delta": part, "logprobs": None, "finish_reason": finish}
            yield event({**common, "choices": [choice], **pending})
    if counts:
        yield event({**common, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def error(status: HTTPStatus, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def models() -> dict[str, Any]:
    """Return the list of models, with the fields of OpenAI and Anthropic."""
    return {"object": "list", "data": [model("policy")], "has_more": False, "first_id": "policy", "last_id": "policy"}


def model(name: str) -> dict[str, Any]:
    """Return the description of a model; any name means the trained model."""
    born = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "rlinf", **born}


def _common(ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": ask.model}


def _shown(answer: SaidTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None if answer.calls else answer.text}
    return {**message, "tool_calls": [call.entry() for call in answer.calls]} if answer.calls else message


def _finish(answer: SaidTurn) -> str:
    return "tool_calls" if answer.calls else answer.finish


def _usage(answers: Sequence[SaidTurn]) -> dict[str, int]:
    before, drawn = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}
