"""What is refused as the tensor of `send_tensor`, and as the buffer of `recv_tensor`."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.message import encode
from rlinf_core.collective.torch_payload import TensorTarget, share_memory, tensor_parts
from rlinf_core.errors import PayloadError


class Wrapper(torch.Tensor):
    """Has a shape, and its numbers elsewhere."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        return NotImplemented


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def freed(start: int = 0) -> Any:
    tensor = torch.ones(8)[start:]
    tensor.untyped_storage().resize_(0)
    return tensor


NEITHER = {
    "list": (lambda: [1, 2], "not a `list`"),
    "none": (lambda: None, "not a `NoneType`"),
    "number": (lambda: np.float32(1), "not a `float32`"),
    "objects": (lambda: np.array([object()]), "dtype `object`"),
    "field of objects": (lambda: np.zeros(2, [("a", "i4"), ("b", "O")]), "numbers"),
    "masked": (lambda: np.ma.array([1, 2], mask=[0, 1]), "mask would stay behind"),
    "sparse": (lambda: torch.ones(2).to_sparse(), "sparse_coo"),
    "nested": (nested, "nested"),
    "quantized": (quantized, "quantized"),
    "meta": (lambda: torch.empty(2, device="meta"), "`meta`"),
    "freed": (freed, "storage was freed"),
    "view of freed": (lambda: freed(4), "storage was freed"),
    "wrapper": (lambda: Wrapper(torch.ones(2)), "a `Wrapper` stands for other tensors"),
}


@pytest.mark.parametrize("kind", NEITHER)
def test_what_is_more_or_less_than_its_bytes_is_refused(kind: str) -> None:
    make, words = NEITHER[kind]
    with pytest.raises(PayloadError, match=words):
        tensor_parts(make())
    with pytest.raises(PayloadError, match=words):
        TensorTarget(make())


def test_a_freed_tensor_within_an_object_is_refused() -> None:
    with pytest.raises(PayloadError, match="storage was freed"):
        encode({"weights": [freed()]}, lambda *_: b"")


UNFILLABLE = {
    "expanded": lambda: torch.zeros(1).expand(3),
    "expanded rows": lambda: torch.zeros(3).expand(2, 3),
    "overlapping": lambda: torch.zeros(5).as_strided((3, 3), (1, 1)),
    "broadcast array": lambda: np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8)),
    "windows": lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3, writeable=True),
}


@pytest.mark.parametrize("kind", UNFILLABLE)
def test_a_buffer_whose_elements_share_memory_is_refused(kind: str) -> None:
    with pytest.raises(PayloadError, match="share memory"):
        TensorTarget(UNFILLABLE[kind]())


def test_read_only_array_is_sent_but_refused_as_a_buffer() -> None:
    array = np.frombuffer(b"\1" * 16, np.float32)
    with pytest.raises(PayloadError, match=r"read-only array\n  help: .*array.copy"):
        TensorTarget(array)
    assert tensor_parts(array)[0] == b"float32[4]"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=4))
def test_what_passes_has_a_place_for_every_element(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    places = [
        sum(index * stride for index, stride in zip(at, strides, strict=True))
        for at in itertools.product(*(range(size) for size in shape))
    ]
    if not share_memory(shape, strides):
        assert len(set(places)) == len(places)


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 3)] * 3), st.booleans())
def test_slices_and_transpositions_pass(order: list[int], steps: tuple[int, int, int], turned: bool) -> None:
    array = np.zeros((4, 5, 6), [("a", "f4"), ("b", "f8")])["b"].transpose(order)
    array = array[tuple(slice(None, None, -step if turned else step) for step in steps)]
    assert not share_memory(array.shape, array.strides, array.itemsize)
    TensorTarget(array)


def conjugate() -> Any:
    return torch.zeros(2, dtype=torch.complex64).conj()


def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return torch.zeros(2, 3).t()


@pytest.mark.parametrize(
    "make",
    [
        conjugate,
        lambda: conjugate().imag,
        made_in_inference_mode,
        lambda: torch.zeros(2, 3, requires_grad=True).t(),
        lambda: np.zeros((3, 2), np.float32)[::-1],
        lambda: np.zeros((3, 2)).view(np.matrix),
        lambda: np.zeros(3, ">f4"),
    ],
    ids=["conjugate", "negative", "inference", "gradient", "reversed", "matrix", "order"],
)
def test_an_unusual_buffer_reads_as_what_was_sent(make: Any) -> None:
    buffer = make()
    template = buffer.detach() if isinstance(buffer, torch.Tensor) else buffer
    sent = template * 0 + 3 - 1 + (2j if template.dtype == torch.complex64 else 0)
    sent = sent.resolve_conj().contiguous() if isinstance(sent, torch.Tensor) else sent.astype(template.dtype)
    _, part = tensor_parts(sent)
    data = memoryview(bytearray(part.nbytes))
    part.copy_into(data)
    TensorTarget(buffer).fill(data)
    assert buffer.tolist() == sent.tolist()
