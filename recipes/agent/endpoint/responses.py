"""The protocol of OpenAI's Responses API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from recipes.agent.conversation.call_forms import FunctionCall
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.endpoint import chat
from recipes.agent.endpoint.chats import ROLES, Ask, Chats, SaidTurn, Transcript, event, parse_functions
from recipes.agent.endpoint.fields import (
    check_fields,
    check_sampling,
    content_text,
    flag,
    listed,
    object_field,
    text_field,
    whole_number,
)
from recipes.language.loopback_server import bad_request

error = chat.error

_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_READ: Final = (
    *("input", "instructions", "model", "max_output_tokens", "previous_response_id", "store", "stream", "tools"),
    *("tool_choice", "parallel_tool_calls", "temperature", "top_p", "text"),
)
_IGNORED: Final = (
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "stream_options",
)
_FIXED: Final[Mapping[str, tuple[Any, str]]] = {
    "background": (False, "responses are returned synchronously"),
    "truncation": ("disabled", "conversations are never truncated"),
    "include": ([], "nothing is returned besides the output"),
    "top_logprobs": (0, "log-probabilities are used by the run and not returned"),
    "reasoning": ({}, "reasoning effort is not supported; `data.chat_template_kwargs` may turn thinking off"),
}


def read(request: dict[str, Any], chats: Chats) -> Ask:
    """Parse a request.

    Raises:
        RequestError: the request is invalid, or asks for something unsupported.
    """
    check_fields(request, _READ, _IGNORED, _FIXED)
    check_sampling(request, chats.settings)
    text = object_field(request, "text")
    if object_field(text, "format").get("type", "text") != "text" or text.get("verbosity", "medium") != "medium":
        raise bad_request("`text`: the model writes plain text; describe the format in a message")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise bad_request("`tool_choice` must be `auto` or `none` here: the model chooses")
    tools = listed(request.get("tools") or [], "tools")
    for tool in tools:
        if tool.get("type") != "function":
            raise bad_request(f"a tool of type `{tool.get('type')}` is not supported here: use functions")
    functions = parse_functions(
        [{key: tool.get(key) for key in ("name", "description", "parameters")} for tool in tools],
        may_call=request.get("tool_choice") != "none",
        single=not flag(request, "parallel_tool_calls", default=True),
    )
    instructions = text_field(request, "instructions", "")
    system = [ChatMessage("system", instructions)] if instructions else []
    messages = (*system, *_messages(_items(request, chats), Transcript(chats)))
    if not messages:
        raise bad_request("`input` must be a text, or a list of at least one item")
    return Ask(
        messages,
        functions.offer,
        functions.callable,
        most=whole_number(request, "max_output_tokens"),
        model=text_field(request, "model", "policy"),
        streams=flag(request, "stream"),
    )


def _items(request: dict[str, Any], chats: Chats) -> list[dict[str, Any]]:
    """Return the items of a conversation: those up to the previous response, and the request's."""
    content, earlier = request.get("input"), text_field(request, "previous_response_id", "")
    if earlier and earlier not in chats.responses:
        raise bad_request(f"there is no stored response `{earlier}`")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else listed(content or [], "input")
    return [*chats.responses.get(earlier, ()), *items]


def _messages(items: Sequence[dict[str, Any]], transcript: Transcript) -> Iterator[ChatMessage]:
    """Yield messages; assistant text and the calls that follow it form one message."""
    said: str | None = None
    calls: list[FunctionCall] = []

    def turn() -> Iterator[ChatMessage]:
        nonlocal said
        if calls:
            yield transcript.calling(said or "", calls)
        elif said is not None:
            yield ChatMessage("assistant", said)
        said = None
        calls.clear()

    for item in items:
        kind = item.get("type", "message")
        role = ROLES.get(str(item.get("role")))
        if kind == "function_call":
            calls.append(transcript.call(item.get("name"), item.get("arguments"), item.get("call_id")))
            continue
        yield from turn()
        if kind == "function_call_output":
            text = content_text(item.get("output"), _PARTS)
            yield transcript.result(item.get("call_id"), text, field="call_id")
        elif kind != "message" or role is None or role == "tool":
            raise bad_request(f"an `input` item of type `{kind}` is not supported: use messages, calls and outputs")
        elif role == "assistant":
            said = content_text(item.get("content"), _PARTS)
        else:
            yield ChatMessage(role, content_text(item.get("content"), _PARTS))
    yield from turn()


def written(
    request: dict[str, Any], ask: Ask, answers: Sequence[SaidTurn], chats: Chats
) -> dict[str, Any] | Iterator[str]:
    """Return a response, or the events of a stream; it is stored for requests that continue it."""
    (answer,) = answers
    output = _output(answer)
    response = _response(request, ask, answer, output)
    if request.get("store") is not False:
        chats.responses[response["id"]] = [*_items(request, chats), *output]
    return _events(response) if ask.streams else response


def _output(answer: SaidTurn) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if answer.text or not answer.calls:
        part: dict[str, Any] = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "status": status, "role": "assistant"}
        output.append({**message, "content": [part]})
    for function_call in answer.calls:
        call = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "status": "completed"}
        output.append(
            {**call, "call_id": function_call.call_id, "name": function_call.name, "arguments": function_call.arguments}
        )
    return output


def _response(request: Mapping[str, Any], ask: Ask, answer: SaidTurn, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.finish == "length"
    echoed = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "metadata": request.get("metadata") or {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.tokens,
        },
        **{name: request.get(name) for name in echoed},
    }


def _events(response: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a stream; each item is sent whole."""
    begun: dict[str, Any] = {
        **response,
        "status": "in_progress",
        "output": [],
        "incomplete_details": None,
        "usage": None,
    }
    steps: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        steps += _item_steps(index, item)
    steps.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, fields) in enumerate(steps):
        yield event({"type": kind, "sequence_number": number, **fields}, kind)


def _item_steps(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
    if item["type"] == "message":
        (part,) = item["content"]
        at["content_index"] = 0
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**at, "part": part}
    else:
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **done}
    yield "response.output_item.done", {"output_index": index, "item": item}
