"""What numpy says about bytes, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.collective.torch_payload import dtype_words

_SPARSE = {"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [0, 8], "itemsize": 16}
DIFFERENT = [
    ("<f4", ">f4"),
    ("<i2", "<u2"),
    ("<c8", ">c8"),
    ("<M8[s]", "<M8[D]"),
    ("<M8[s]", "<m8[s]"),
    ("<U2", ">U2"),
    ("<U1", "S4"),
    ("V4", "S4"),
    ([("a", "<i4"), ("b", "<f4")], [("b", "<f4"), ("a", "<i4")]),
    ([("a", "<i4"), ("b", "<f4")], [("a", "<i4"), ("b", ">f4")]),
    ([("a", "<i4"), ("b", "<f4")], "V8"),
    ([("a", "<i4", (2, 3))], [("a", "<i4", (3, 2))]),
    ([("a", [("x", "<i2"), ("y", "<i2")])], [("a", [("y", "<i2"), ("x", "<i2")])]),
    ([("a", "<i4"), ("", "V4"), ("b", "<f4"), ("", "V4")], [("a", "<i4"), ("b", "<f4"), ("", "V8")]),
    (_SPARSE, {**_SPARSE, "offsets": [8, 0]}),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=str)
def test_what_takes_other_bytes_has_other_words(one: Any, other: Any) -> None:
    assert dtype_words(np.dtype(one)) != dtype_words(np.dtype(other))


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex64"])
def test_machine_order_numbers_are_named_as_torch_names_them(name: str) -> None:
    assert dtype_words(np.dtype(name)) == name == str(getattr(torch, name)).removeprefix("torch.")


def test_the_same_bytes_have_the_same_words() -> None:
    assert dtype_words(np.dtype("l")) == dtype_words(np.dtype("q"))
    assert dtype_words(np.dtype(">u1")) == dtype_words(np.dtype("<u1"))
    fields: list[Any] = [("a", "<i4"), ("b", "<f4")]
    assert dtype_words(np.dtype(fields)) == dtype_words(np.dtype(fields, align=True))
    assert dtype_words(np.rec.array([(1, 2.0)], dtype=fields).dtype) == dtype_words(np.dtype(fields))


def test_the_words_are_for_people_too() -> None:
    assert dtype_words(np.dtype(">f4")) == ">float32"
    assert dtype_words(np.dtype("<M8[s]")) == "<M8[s]"
    assert dtype_words(np.dtype([("a", "<i4"), ("b", ">f4")])) == "{'a': int32 at 0, 'b': >float32 at 4} of 8 bytes"
