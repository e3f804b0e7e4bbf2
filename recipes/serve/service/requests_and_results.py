"""Conversion of the Tinker SDK's requests and results between protobuf messages and values.

The messages have the field numbers of an unmodified SDK (0.38), but their own names. Unused fields are left out: the
protobuf package keeps them as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from recipes.language.loopback_server import LARGEST_DECODED, bad_request
from recipes.serve.values import Datum, PassOutcome, SampleOutcome, TopTokens
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget, OverBudgetError

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_PACKAGE: Final = "rlinf_serve"
# Messages by name: `number name type`; `*` marks a list, `?` an optional field, `{}` a map from texts.
_MESSAGES: Final[dict[str, str]] = {
    "CsrTensor": "1 values bytes, 2 rows bytes, 3 columns bytes",
    "TensorMessage": "1 dense bytes?, 2 sparse CsrTensor?, 3 dtype int32, 4 shape int64*",
    "TextChunk": "1 tokens bytes",
    "InputChunk": "1 text TextChunk?, 2 image bytes?, 3 audio bytes?",
    "DatumMessage": "1 input InputChunk*, 2 values TensorMessage{}",
    "Setting": "1 number double?, 2 text string?",
    "PassMessage": (
        "1 model_id string, 2 seq_id int32, 3 data DatumMessage*, 4 loss string, 5 numbers double{},"
        " 6 forward_only bool, 7 settings Setting{}"
    ),
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "OutputRecord": "1 kind string, 2 fields BatchedTensor{}, 3 count int64",
    "PassResult": "1 kind string, 2 outputs OutputRecord*, 3 metrics double{}",
    "TopMessage": "1 ids bytes, 2 logprobs bytes, 3 k int32, 4 length int32",
    "SampledTokens": "1 reason int32, 2 tokens bytes, 3 logprobs bytes?, 4 top TopMessage?",
    "SampleResult": "1 sequences SampledTokens*, 2 prompt_logprobs bytes?, 3 prompt_top TopMessage?",
}
_SCALARS: Final = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "double": _FIELD.TYPE_DOUBLE,
    "bool": _FIELD.TYPE_BOOL,
}


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    base = kind.rstrip("*?{}")
    if kind.endswith("{}"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", base)
        field.type, field.label = _FIELD.TYPE_MESSAGE, _FIELD.LABEL_REPEATED
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if base in _SCALARS:
        field.type = _SCALARS[base]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{base}"
    if kind.endswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    elif kind.endswith("?") and base in _SCALARS:
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="rlinf_serve.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            number, label, kind = field.split()
            _add_field(message, int(number), label, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - absent from the stubs
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_MADE: Final = _classes()
PASS_MESSAGE: Final[Any] = _MADE["PassMessage"]
PASS_RESULT: Final[Any] = _MADE["PassResult"]
SAMPLE_RESULT: Final[Any] = _MADE["SampleResult"]

# Bytes of a parsed field, and of a number in a packed list.
_PART: Final = 256
_PACKED: Final = 8
# Bytes of a value of fixed size, by wire type.
_FIXED: Final = {1: 8, 5: 4}
_VARINT, _CHUNK = 0, 2


def take_parts(body: bytes, descriptor: Any, budget: Budget, at: int = 0, end: int | None = None) -> None:
    """Take the memory of a message's parsed fields from a budget, as even an empty message of two bytes needs much.

    Args:
        body: the bytes that contain the message.
        descriptor: the protobuf descriptor of the message.
        budget: the budget of the body.
        at, end: the range of the message; by default the whole body.

    Raises:
        OverBudgetError: the budget is exceeded.
        IndexError: the body ends within a field.
    """
    end = len(body) if end is None else end
    while at < end:
        budget.take(_PART)
        tag, at = _varint(body, at)
        size, kind = 0, tag & 7
        if kind == _VARINT:
            _, at = _varint(body, at)
        elif kind == _CHUNK:
            size, at = _varint(body, at)
        field = descriptor.fields_by_number.get(tag >> 3)
        if size and field is not None and field.message_type is not None:
            take_parts(body, field.message_type, budget, at, min(end, at + size))
        elif size and field is not None and field.type not in (_FIELD.TYPE_BYTES, _FIELD.TYPE_STRING):
            budget.take(_PACKED * size)
        at += size + _FIXED.get(kind, 0)


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return a number with seven bits per byte, and the position after it."""
    number = shift = 0
    while True:
        byte = body[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            return number, at


# The wire numbers of tensor types.
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
        model_id, seq_id: the model, and the number among its requests.
        loss: the name of the loss.
        settings: the settings of the loss.
        forward_only: whether no gradients are computed.
        digest_bytes: the request in deterministic bytes, from which `read_data` reads the data.
        tokens: the number of tokens of all data.
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
    """Return the data of a request for a pass, after checking the total size of its tensors.

    Raises:
        RequestError: a datum is malformed, or the tensors together are too large.
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
    """Return the declared shape of a tensor; empty: one dimension with all its numbers."""
    if len(message.shape) > 2:
        raise bad_request(f"{where} has {len(message.shape)} dimensions: one or two are taken")
    shape = list(message.shape)
    if any(size < 0 for size in shape):
        raise bad_request(f"{where} has shape {shape}: a size cannot be negative")
    return shape


def _densified(message: Any, dtype: np.dtype[Any], shape: list[int], where: str) -> Array:
    """Return a sparse tensor as a dense array."""
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
    """Encode the result of a pass: log-probabilities of each datum, and metrics."""
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
    """Return arrays in runs of equal shape except their lengths."""
    runs: list[list[Array]] = []
    for array in arrays:
        if runs and runs[-1][0].shape[1:] == array.shape[1:]:
            runs[-1].append(array)
        else:
            runs.append([array])
    return runs


def sample_bytes(outcome: SampleOutcome) -> bytes:
    """Encode the answers to a prompt."""
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
    """Set a field with the most likely tokens; without tokens, it stays absent."""
    if top is not None:
        message.length, message.k = top.ids.shape
        message.ids, message.logprobs = top.ids.astype(np.int32).tobytes(), top.logprobs.astype(np.float32).tobytes()
