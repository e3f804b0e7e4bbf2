"""Requests and results in the protobuf messages of the Tinker SDK, as values and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from recipes.language.listening.limits import LARGEST_DECODED
from recipes.language.listening.request_error import bad_request
from recipes.serve.values import Datum, PassOutcome, SampleOutcome, TopTokens
from recipes.serve.wire.messages import PASS_MESSAGE, PASS_RESULT, SAMPLE_RESULT, take_parts
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget, OverBudgetError

# The types of tensors, by their numbers on the wire.
_FLOAT, _INT = 1, 2
_DTYPES: Final = {_FLOAT: np.dtype(np.float32), _INT: np.dtype(np.int64)}
_TOKEN_BYTES: Final = 4
_MOST_SETTINGS: Final = 16
_LARGEST_ITEM: Final = max(dtype.itemsize for dtype in _DTYPES.values())
_INPUTS: Final = {
    "target_tokens": _INT,
    "weights": _FLOAT,
    "logprobs": _FLOAT,
    "advantages": _FLOAT,
    "clip_low_threshold": _FLOAT,
    "clip_high_threshold": _FLOAT,
    "sequence_ratio_mask": _FLOAT,
}
_REASONS: Final = {"stop": 0, "length": 1}


class PassRequest(NamedTuple):
    """A request for a forward pass, or a forward and backward pass.

    Attributes:
        model_id, seq_id: place in the order of the model's requests.
        loss: name.
        settings: the settings of the loss.
        forward_only: whether no gradients are computed.
        digest_bytes: the same bytes for the same request; `read_data` returns their data.
        tokens: the tokens of all data together.
    """

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    digest_bytes: bytes
    tokens: int


def read_pass(body: bytes) -> PassRequest:
    """Return the head of a request for a pass.

    Raises:
        RequestError: the bytes are not that message.
    """
    try:
        take_parts(body, PASS_MESSAGE.DESCRIPTOR, Budget(LARGEST_DECODED, "a body"))
        message = PASS_MESSAGE.FromString(body)
    except OverBudgetError as error:
        raise bad_request(f"the body {error}") from None
    except (DecodeError, IndexError):
        raise bad_request("the body is not a protobuf message of forward_backward") from None
    if len(message.numbers) + len(message.settings) > _MOST_SETTINGS:
        raise bad_request(f"a loss has at most {_MOST_SETTINGS} settings")
    settings: dict[str, float | str] = dict(message.numbers)
    for name, setting in message.settings.items():
        settings[name] = setting.text if setting.HasField("text") else setting.number
    digest = message.SerializeToString(deterministic=True)
    tokens = sum(len(chunk.text.tokens) // _TOKEN_BYTES for datum in message.data for chunk in datum.input)
    head = (message.model_id, message.seq_id, message.loss, settings, message.forward_only)
    return PassRequest(*head, digest, tokens)


def read_data(request: PassRequest) -> list[Datum]:
    """Return the data of a request for a pass, once the shapes of all its tensors are added up.

    Raises:
        RequestError: a datum is malformed, or the tensors are too large together.
    """
    data = PASS_MESSAGE.FromString(request.digest_bytes).data
    budget = Budget(LARGEST_DECODED, "a body")
    for number, message in enumerate(data):
        for name, tensor in message.values.items():
            where = f"datum {number}, `{name[:60]}`"
            shape = _shape(tensor, where)
            try:
                budget.take_array(shape or (len(tensor.dense),), 1 if not shape else _LARGEST_ITEM, where)
            except OverBudgetError as error:
                raise bad_request(f"the body {error}") from None
    return [_datum(message, f"datum {number}") for number, message in enumerate(data)]


def _datum(message: Any, where: str) -> Datum:
    parts: list[Array] = []
    for chunk in message.input:
        if not chunk.HasField("text"):
            raise bad_request(f"{where} has an image or audio chunk: this model reads only text tokens")
        parts.append(_numbers(chunk.text.tokens, np.dtype(np.int32), f"{where}, tokens"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    values: dict[str, Array] = {}
    for name, tensor in message.values.items():
        if name not in _INPUTS:
            known = ", ".join(_INPUTS)
            raise bad_request(f"{where}: `{name[:60]}` is not an input of a loss here; there are {known}")
        values[name] = _tensor(tensor, _INPUTS[name], f"{where}, `{name}`")
    return Datum(tokens, values)


def _tensor(message: Any, kind: int, where: str) -> Array:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise bad_request(f"{where} has data type {message.dtype}: send float32 or int64")
    shape = _shape(message, where)
    if message.HasField("sparse"):
        array = _densified(message.sparse, dtype, shape, where)
    else:
        array = _numbers(message.dense, dtype, where)
        shape = shape or [len(array)]
        if math.prod(shape) != len(array):
            raise bad_request(f"{where} has shape {shape} but {len(array)} numbers")
        array = array.reshape(shape)
    if kind == _INT and message.dtype != _INT:
        raise bad_request(f"{where} must be int64")
    return array.astype(_DTYPES[kind])


def _shape(message: Any, where: str) -> list[int]:
    """Return the shape that a tensor claims; empty: as many numbers as it has."""
    if len(message.shape) > 2:
        raise bad_request(f"{where} has {len(message.shape)} dimensions: one or two are taken")
    shape = list(message.shape)
    if any(size < 0 for size in shape):
        raise bad_request(f"{where} has shape {shape}: a size cannot be negative")
    return shape


def _densified(message: Any, dtype: np.dtype[Any], shape: list[int], where: str) -> Array:
    """Return a sparse tensor with zeros in the places that it does not list."""
    values = _numbers(message.values, dtype, where)
    starts, columns = (_numbers(part, np.dtype(np.int64), where) for part in (message.rows, message.columns))
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    if not fits or starts[0] != 0 or starts[-1] != len(values) or (np.diff(starts) < 0).any():
        raise bad_request(f"{where}: the row pointers of the sparse tensor do not fit its shape {shape}")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise bad_request(f"{where}: a column index of the sparse tensor is outside of its shape {shape}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense


def _numbers(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise bad_request(f"{where}: {len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def pass_bytes(outcome: PassOutcome) -> bytes:
    """Return the message with the result of a pass: log-probabilities of each datum, and metrics."""
    message = PASS_RESULT(kind="LogProbs")
    for name, value in outcome.metrics.items():
        message.metrics[name] = value
    for run in _equal_shapes(outcome.logprobs):
        record = message.outputs.add(kind="LogProbs", count=len(run))
        field = record.fields["logprobs"]
        sizes = [array.astype(np.float32).nbytes for array in run]
        field.data = b"".join(array.astype(np.float32).tobytes() for array in run)
        field.offsets = np.cumsum([0, *sizes]).astype(np.int64).tobytes()
        field.dtype = _FLOAT
        field.trailing_shape.extend(run[0].shape[1:])
    return message.SerializeToString()


def _equal_shapes(arrays: Sequence[Array]) -> list[list[Array]]:
    """Return arrays in runs that have the same shape but for their lengths."""
    runs: list[list[Array]] = []
    for array in arrays:
        if runs and runs[-1][0].shape[1:] == array.shape[1:]:
            runs[-1].append(array)
        else:
            runs.append([array])
    return runs


def sample_bytes(outcome: SampleOutcome) -> bytes:
    """Return the message with the answers to a prompt."""
    message = SAMPLE_RESULT()
    for answer in outcome.answers:
        sequence = message.sequences.add(
            reason=_REASONS[answer.reason],
            tokens=np.asarray(answer.tokens, np.int32).tobytes(),
            logprobs=np.asarray(answer.logprobs, np.float32).tobytes(),
        )
        _set_top(sequence.top, answer.top)
    if outcome.prompt_logprobs is not None:
        message.prompt_logprobs = outcome.prompt_logprobs.astype(np.float32).tobytes()
    _set_top(message.prompt_top, outcome.prompt_top)
    return message.SerializeToString()


def _set_top(message: Any, top: TopTokens | None) -> None:
    """Set a field with the most likely tokens; without any, it stays absent."""
    if top is not None:
        message.length, message.k = top.ids.shape
        message.ids, message.logprobs = top.ids.astype(np.int32).tobytes(), top.logprobs.astype(np.float32).tobytes()
