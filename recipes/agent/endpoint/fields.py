"""Parsing of request fields; unsupported values are rejected with a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from recipes.agent.conversation.chat_model import DrawSettings
from recipes.language.loopback_server import bad_request
from recipes.language.text.chat_messages import joined_text

_MOST_ANSWERS: Final = 64


def check_fields(
    request: Mapping[str, Any], read: Sequence[str], ignored: Sequence[str], fixed: Mapping[str, tuple[Any, str]]
) -> None:
    """Reject request fields that would otherwise be ignored silently.

    Args:
        request: the fields of the request.
        read: fields that have an effect.
        ignored: fields without meaning for a model that is being trained.
        fixed: fields with their only allowed value, and the reason.

    Raises:
        RequestError: a field has another value, or is unknown.
    """
    for name, value in request.items():
        if value is None or name in read or name in ignored:
            continue
        if name not in fixed:
            raise bad_request(f"`{name}` is not supported here: remove it")
        if value != fixed[name][0]:
            raise bad_request(f"`{name}`: {fixed[name][1]}")


def check_sampling(request: Mapping[str, Any], settings: DrawSettings) -> None:
    """Check that a request's sampling parameters are the run's; 1, the APIs' default, is allowed, too.

    Raises:
        RequestError: a parameter differs.
    """
    usual = {
        "temperature": (settings.temperature, settings.training_temperature, 1),
        "top_p": (settings.top_p, 1),
    }
    for name, values in usual.items():
        value = request.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_request(f"`{name}` must be a number")
        if value not in values:
            raise bad_request(
                f"`{name}` is {values[0]:g} in this run, but the request has {value:g}: the model learns from its"
                " samples, drawn with `rollout.sampling_params`. Remove it"
            )
    if request.get("seed") is not None:
        raise bad_request(
            "`seed` is not supported: the job's seed makes the runs of a task sample different tokens. Remove it"
        )


def text_field(request: Mapping[str, Any], name: str, default: str) -> str:
    """Return a text field of a request.

    Raises:
        RequestError: the field is not a text.
    """
    value = request.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"`{name}` must be a text")
    return value or default


def flag(request: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean field of a request.

    Raises:
        RequestError: the field is neither true nor false.
    """
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"`{name}` must be true or false")
    return default if value is None else value


def whole_number(request: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """Return a positive integer field of a request; None if it is absent.

    Raises:
        RequestError: the field is no positive integer, or too large.
    """
    value = request.get(name)
    if value is None or (type(value) is int and 0 < value <= (most or value)):
        return value
    raise bad_request(f"`{name}` must be an integer from 1" + (f" to {most}" if most else ""))


def answers_field(request: Mapping[str, Any]) -> int:
    """Return the number of answers that `n` requests."""
    return whole_number(request, "n", _MOST_ANSWERS) or 1


def stop_texts(request: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the texts that end the turn.

    Raises:
        RequestError: the field is no text or list of texts, or a text is empty.
    """
    value = request.get(name)
    listed = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in cast("list[Any]", listed)):
        raise bad_request(f"`{name}` must be a non-empty text, or a list of non-empty texts")
    return tuple(cast("list[str]", listed))


def listed(value: Any, name: str) -> list[dict[str, Any]]:
    """Check that a value is a list of objects, and return it.

    Raises:
        RequestError: the value is no such list.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise bad_request(f"`{name}` must be a list of objects")
    return cast("list[dict[str, Any]]", value)


def object_field(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object field of a request; an empty object if it is absent.

    Raises:
        RequestError: the field is no object.
    """
    value = request.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"`{name}` must be an object")
    return cast("dict[str, Any]", value or {})


def content_text(content: Any, types: Mapping[str, str]) -> str:
    """Return the text of a message's content, which is a text or a list of parts.

    Args:
        content: the content of the message.
        types: the types of text parts, with the key that holds their text.

    Raises:
        RequestError: the content is neither, or a part is not text.
    """
    text = joined_text(content, types)
    if text is None:
        if not isinstance(content, list):
            raise bad_request("the `content` of a message must be a text or a list of parts")
        parts = listed(cast("list[Any]", content), "content")
        kind = next(str(part.get("type")) for part in parts if joined_text([part], types) is None)
        raise bad_request(f"a `content` part of type `{kind}` is not supported: the model reads only text")
    return text
