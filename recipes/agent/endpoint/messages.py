"""The protocol of Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.endpoint.chats import (
    Ask,
    Chats,
    Functions,
    SaidTurn,
    Transcript,
    event,
    parse_functions,
)
from recipes.agent.endpoint.fields import (
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

_PARTS: Final = {"text": "text"}
_READ: Final = (
    *("messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice"),
    *("temperature", "top_p"),
)
_IGNORED: Final = ("metadata", "service_tier", "cache_control")
_FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "thinking": ({"type": "disabled"}, "thinking has no budget; `data.chat_template_kwargs` may turn it off"),
    "top_k": (-1, "the model learns from its samples, drawn with `rollout.sampling_params`"),
    "mcp_servers": ([], "configure the job's servers as `agent.mcp`"),
}
_ERRORS: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read(request: dict[str, Any], chats: Chats) -> Ask:
    """Parse a request.

    Raises:
        RequestError: the request is invalid, or asks for something unsupported.
    """
    if request.get("max_tokens") is None:
        raise bad_request("`max_tokens` is missing")
    return read_counted(request, chats)


def read_counted(request: dict[str, Any], chats: Chats) -> Ask:
    """Parse a token-counting request, which needs no `max_tokens`.

    Raises:
        RequestError: the request is invalid, or asks for something unsupported.
    """
    check_fields(request, _READ, _IGNORED, _FIXED)
    check_sampling(request, chats.settings)
    functions = _functions(request)
    messages = _messages(request, chats)
    return Ask(
        messages,
        functions.offer,
        functions.callable,
        stop_texts(request, "stop_sequences"),
        whole_number(request, "max_tokens"),
        text_field(request, "model", "policy"),
        flag(request, "stream"),
    )


def _functions(request: dict[str, Any]) -> Functions:
    choice = object_field(request, "tool_choice")
    if choice.get("type", "auto") not in ("auto", "none"):
        raise bad_request("`tool_choice` must be of type `auto` or `none` here: the model chooses")
    tools = listed(request.get("tools") or [], "tools")
    for tool in tools:
        if tool.get("type", "custom") != "custom":
            raise bad_request(f"a tool of type `{tool['type']}` is not supported here: use one with an `input_schema`")
    described = [
        {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        for tool in tools
    ]
    single = flag(choice, "disable_parallel_tool_use")
    return parse_functions(described, may_call=choice.get("type") != "none", single=single)


def _messages(request: dict[str, Any], chats: Chats) -> tuple[ChatMessage, ...]:
    system = request.get("system")
    messages = [ChatMessage("system", content_text(system, _PARTS))] if system else []
    entries = listed(request.get("messages"), "messages")
    if not entries:
        raise bad_request("`messages` must be a list of at least one message")
    if entries[-1].get("role") == "assistant":
        raise bad_request("the last message is the assistant's: continuing a turn is not supported")
    transcript = Transcript(chats)
    for entry in entries:
        if entry.get("role") == "assistant":
            messages.append(_assistant(entry, transcript))
        elif entry.get("role") == "user":
            messages += _user(entry, transcript)
        else:
            raise bad_request("a message needs a `role`: user or assistant")
    merged: list[ChatMessage] = []
    for message in messages:
        # In this protocol, consecutive user messages form one turn.
        if merged and message.role == merged[-1].role == "user":
            merged[-1] = ChatMessage("user", f"{merged[-1].text}\n{message.text}")
        else:
            merged.append(message)
    return tuple(merged)


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, "content")


def _assistant(message: dict[str, Any], transcript: Transcript) -> ChatMessage:
    blocks = _blocks(message)
    text = content_text([block for block in blocks if block.get("type") != "tool_use"], _PARTS)
    calls = [
        transcript.call(block.get("name"), block.get("input"), block.get("id"))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return transcript.calling(text, calls) if calls else ChatMessage("assistant", text)


def _user(message: dict[str, Any], transcript: Transcript) -> Iterator[ChatMessage]:
    texts: list[dict[str, Any]] = []
    for block in _blocks(message):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        text = content_text(block.get("content") or "", _PARTS)
        failed = flag(block, "is_error")
        yield transcript.result(block.get("tool_use_id"), f"error: {text}" if failed else text, field="tool_use_id")
    if texts:
        yield ChatMessage("user", content_text(texts, _PARTS))


def written(
    request: dict[str, Any], ask: Ask, answers: Sequence[SaidTurn], chats: Chats
) -> dict[str, Any] | Iterator[str]:
    """Return a message, or the events of a stream."""
    (answer,) = answers
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    content += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}
        for call in answer.calls
    ]
    ends = {"calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    message: dict[str, Any] = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": content,
        "stop_reason": "stop_sequence" if answer.stop else ends[answer.finish],
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens},
    }
    return _events(message) if ask.streams else message


def _events(message: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a stream; each block is sent whole."""
    begun: dict[str, Any] = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**message["usage"], "output_tokens": 0}
    yield _named({"type": "message_start", "message": begun})
    for index, block in enumerate(message["content"]):
        # A block starts without its text or arguments.
        empty: dict[str, Any] = {**block, **({"text": ""} if block["type"] == "text" else {"input": {}})}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if block["type"] == "text"
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        yield _named({"type": "content_block_start", "index": index, "content_block": empty})
        yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    end = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    yield _named({"type": "message_delta", "delta": end, "usage": message["usage"]})
    yield _named({"type": "message_stop"})


def _named(data: dict[str, Any]) -> str:
    return event(data, data["type"])


def error(status: HTTPStatus, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
