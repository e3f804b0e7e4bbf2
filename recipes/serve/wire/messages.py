"""Protobuf messages of the Tinker SDK's wire, by field numbers; names are this project's own.

The messages are those that an unmodified SDK sends and reads (0.38). Fields that nothing is done with are left out: the
protobuf package keeps them as unknown.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rlinf_core.foreign.budget import Budget

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_PACKAGE: Final = "rlinf_serve"
# Messages by name: `number name type`; `*` marks a list, `?` a field whose absence is seen, `{}` a map from texts.
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

# Bytes that a field takes once it is parsed and looked at, and those of a number in a packed list.
_PART: Final = 256
_PACKED: Final = 8
# Bytes after the tag, by its wire type.
_FIXED: Final = {1: 8, 5: 4}
_VARINT, _CHUNK = 0, 2


def take_parts(body: bytes, descriptor: Any, budget: Budget, at: int = 0, end: int | None = None) -> None:
    """Draw what the fields of a message take once it is parsed: an empty message of two bytes takes as much as others.

    Args:
        body: contains the message.
        descriptor: the descriptor of the message, of protobuf.
        budget: the budget of the body.
        at, end: where the message lies; by default it is the whole body.

    Raises:
        OverBudgetError: there is not enough.
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
    """Return a number of seven bits a byte, and the place after it."""
    number = shift = 0
    while True:
        byte = body[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            return number, at
