"""Validation of the fields of requests before they reach the workers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

import numpy as np

from recipes.language.loopback_server import RequestError
from recipes.serve.config import ServerConfig
from recipes.serve.values import HIGH, LOSS_INPUTS, LOW, AdamSettings, AdapterSettings, Datum, ServedFacts

_SERVED: Final = ", ".join(LOSS_INPUTS)
_LARGEST: Final = 2**31 - 1
_ADAM: Final = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def invalid(message: str) -> RequestError:
    """Return the error for an invalid request."""
    return RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, message)


def whole(fields: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    """Return an integer of a request.

    Raises:
        RequestError: the field is not an integer, or out of bounds.
    """
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise invalid(f"`{name}` must be an integer from {least} to {most}, not {_shown(value)}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float, least: float = -math.inf) -> float:
    """Return a finite number of a request.

    Raises:
        RequestError: the field is not a finite number, or too small.
    """
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" from {least:g}"
        raise invalid(f"`{name}` must be a finite number{bound}, not {_shown(value)}")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false.

    Raises:
        RequestError: the field is neither.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"`{name}` must be true or false, not {_shown(value)}")
    return default if value is None else value


def mapping(value: Any, name: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return an object of a request.

    Args:
        value: the value.
        name: the name of the field.
        known: the keys that the object may have; None: any.

    Raises:
        RequestError: the value is not an object, or has an unknown key that is not null.
    """
    if not isinstance(value, dict):
        raise invalid(f"`{name}` must be an object")
    fields = cast("dict[str, Any]", value)
    for key in fields:
        if known is not None and key not in known and fields[key] is not None:
            raise invalid(f"`{name}` has `{_shown(key)}`, which is not read here: it may have {', '.join(known)}")
    return fields


def model_settings(fields: Mapping[str, Any], limits: ServerConfig, facts: ServedFacts, tenant: str) -> AdapterSettings:
    """Return the settings of a new model of a tenant.

    The SDK only asks for adapters; the tenant of `server.full_weights` trains all weights, without a rank.

    Raises:
        RequestError: the settings are invalid, or not allowed for the tenant.
    """
    full = tenant == limits.full_weights
    if not full and fields.get("lora_config") is None:
        raise invalid("only adapters are trained for this tenant: pass `lora_config` with a rank")
    lora = mapping(fields.get("lora_config") or {}, "lora_config", AdapterSettings._fields)
    trained = {name: flag(lora, name, default=True) for name in ("train_attn", "train_mlp", "train_unembed")}
    if full and not all(trained.values()):
        raise invalid("all weights are trained for this tenant (`server.full_weights`): leave `train_...` out")
    if not full and trained["train_unembed"] and not facts.adapts_output:
        raise invalid(
            "the engine of this server takes no adapter of the output layer of this model: pass train_unembed=False"
        )
    if not any(trained.values()):
        raise invalid("one of `train_attn`, `train_mlp` and `train_unembed` must be true")
    return AdapterSettings(
        rank=0 if full else whole(lora, "rank", 1, limits.max_rank),
        seed=whole(lora, "seed", -(2**63), 2**63 - 1, secrets.randbits(32)) & _LARGEST,
        **trained,
    )


def adam(fields: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of an optimizer step.

    Raises:
        RequestError: the settings are of another optimizer, or invalid.
    """
    if fields.get("adam_params") is None:
        raise invalid("only the optimizer adamw is served: pass AdamParams")
    given_fields = mapping(fields["adam_params"], "adam_params", _ADAM)
    values = {name: number(given_fields, name, default, 0.0) for name, default in _ADAM.items()}
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise invalid(f"`{name}` must be below 1, not {values[name]:g}")
    return AdamSettings(**values)


def loss_settings(loss: str, written: Mapping[str, float | str]) -> dict[str, float]:
    """Return the settings of a loss, with defaults.

    Raises:
        RequestError: the loss is not supported, or lacks such a setting, or a value is not a finite number.
    """
    kind = LOSS_INPUTS.get(loss)
    if kind is None:
        raise invalid(f"the loss `{_shown(loss)}` is not served: use one of {_SERVED}, or forward_backward_custom")
    for name, value in written.items():
        if name not in kind.settings:
            has = f"it has {', '.join(kind.settings)}" if kind.settings else "it has none"
            raise invalid(f"`{_shown(name)}` is not a setting of the loss {loss}: {has}")
        if isinstance(value, str) or not math.isfinite(value):
            raise invalid(f"`{name}` of the loss {loss} must be a finite number")
    settings = {**kind.settings, **cast("Mapping[str, float]", written)}
    if settings.get(LOW, 0.0) > settings.get(HIGH, math.inf):
        raise invalid(f"`{LOW}` is {settings[LOW]:g}, above `{HIGH}` {settings[HIGH]:g}: they bound the ratio")
    return settings


def check_data(data: Sequence[Datum], loss: str, vocabulary: int, longest: int) -> None:
    """Check that workers can learn from data.

    Raises:
        RequestError: a datum, which the message names, is invalid, or there is none.
    """
    if not data:
        raise invalid("there is no datum to learn from")
    for place, datum in enumerate(data):
        _check_datum(datum, loss, vocabulary, longest, f"datum {place}")


def _check_datum(datum: Datum, loss: str, vocabulary: int, longest: int, where: str) -> None:
    kind, values = LOSS_INPUTS[loss], datum.values
    check_tokens(datum.tokens, vocabulary, f"{where}, tokens")
    if len(datum.tokens) > longest:
        raise invalid(f"{where} has {len(datum.tokens)} tokens, more than the context of {longest}")
    missing = [name for name in kind.needs if name not in values]
    if missing:
        raise invalid(f"{where}: the loss {loss} needs `{missing[0]}`")
    unread = [name for name in values if name not in (*kind.needs, *kind.takes)]
    if unread:
        raise invalid(f"{where}: the loss {loss} does not read `{unread[0]}`: leave it out")
    targets = values["target_tokens"]
    if len(targets) != len(datum.tokens):
        raise invalid(f"{where} has {len(datum.tokens)} tokens, but targets for {len(targets)}")
    check_tokens(targets.reshape(-1), vocabulary, f"{where}, `target_tokens`")
    for name, value in values.items():
        if value.shape != targets.shape:
            message = f"{where}: `{name}` has shape {list(value.shape)}, but `target_tokens` {list(targets.shape)}"
            raise invalid(message)
        if not np.isfinite(value).all():
            raise invalid(f"{where}: `{name}` has a value that is NaN or infinite")


def check_tokens(tokens: Any, vocabulary: int, where: str) -> None:
    """Check token ids.

    Raises:
        RequestError: there are no ids, or one is not in the vocabulary.
    """
    if not len(tokens):
        raise invalid(f"{where}: there is none")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise invalid(f"{where}: {bad} is not a token of the model, whose ids are 0 to {vocabulary - 1}")


def prompt_tokens(prompt: Any) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    Raises:
        RequestError: the prompt has anything but text tokens.
    """
    chunks = mapping(prompt, "prompt").get("chunks")
    if not isinstance(chunks, list):
        raise invalid("`prompt` must have a list of `chunks`")
    tokens: list[int] = []
    for chunk in cast("list[Any]", chunks):
        part = mapping(chunk, "chunks")
        if part.get("type") != "encoded_text":
            raise invalid(f"a chunk of type `{_shown(part.get('type'))}` is not served: this model reads text tokens")
        ids = part.get("tokens")
        if not isinstance(ids, list) or not all(type(token) is int for token in cast("list[Any]", ids)):
            raise invalid("`tokens` of a chunk must be a list of integers")
        tokens += cast("list[int]", ids)
    return tuple(tokens)


def stops(value: Any, own: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens and the texts that end an answer.

    Args:
        value: None for the model's stop tokens; or a text, texts, or token ids, which replace these; an empty list:
            nothing ends the answer.
        own: the model's stop tokens.

    Raises:
        RequestError: the value is anything else.
    """
    if value is None:
        return own, ()
    ends = cast("list[Any]", value if isinstance(value, list) else [value])
    if all(type(end) is int and 0 <= end < 2**31 for end in ends):
        return tuple(ends), ()
    if all(isinstance(end, str) and end for end in ends):
        return (), tuple(ends)
    raise invalid("`stop` must be a text, a list of texts, or a list of token ids")


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
