"""Objects to streams and parts, and back, also where torch is missing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.cluster.ray_api import pickle_by_value
from rlinf_core.collective.message import Message, decode, encode
from rlinf_core.collective.torch_payload import CustomCopy, TensorTarget, rebuild_tensor
from rlinf_core.errors import PayloadError


@dataclass
class Batch:
    tokens: torch.Tensor
    note: str


def travel(obj: object, **options: Any) -> Any:
    message = Message.of(encode(obj, **options), 1 << 15)
    body = memoryview(bytearray(message.body_size))
    message.gather(body)
    from rlinf_core.collective.message import EncodedBody
    from rlinf_core.collective.transfer.received_messages import ReceivedMessage

    return ReceivedMessage(message.frame(0, 1, EncodedBody(size=message.body_size)), body).load()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_plain_values_come_back_with_their_types(value: object) -> None:
    back = travel(value)
    assert back == value
    assert repr(back) == repr(value)


@given(
    st.sampled_from(
        [torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]
    ),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)
def test_tensors_survive_whatever_dtype_shape_and_strides(dtype: torch.dtype, shape: list[int], turned: bool) -> None:
    tensor = (torch.arange(int(np.prod(shape))) % 2).to(dtype).reshape(shape)
    if turned and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    back = travel([tensor])[0]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_containers_keep_their_kind() -> None:
    back = travel(Batch(torch.ones(3), "x"))
    assert isinstance(back, Batch)
    assert back.note == "x"
    assert back.tokens.tolist() == [1, 1, 1]


def test_tensors_of_a_class_sent_by_value_are_not_pickled() -> None:
    @dataclass
    class Sample:
        tokens: torch.Tensor
        copy: CustomCopy

    tokens = torch.arange(1000.0)[:2].requires_grad_()
    encoded = encode([Sample(tokens, CustomCopy(tokens, torch.Tensor.copy_))], pickle_by_value)
    assert [part.nbytes for part in encoded.parts] == [8, 8]
    sample = travel(Sample(tokens, CustomCopy(tokens, lambda there: there.fill_(5))), fallback=pickle_by_value)
    assert type(sample) is Sample
    assert (sample.tokens.tolist(), sample.tokens.requires_grad) == ([0, 1], False)
    assert sample.copy.tolist() == [5, 5]


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.nn.Parameter(torch.ones(2))])
def test_a_tensor_keeps_the_attributes_that_it_was_given(tensor: Any) -> None:
    tensor.part, tensor.itself = {"of": "actor"}, tensor
    back = travel([tensor])[0]
    assert (type(back), back.part) == (type(tensor), {"of": "actor"})
    assert back.itself is back


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor = torch.ones(3)
    back = travel([tensor, tensor])
    assert back[0] is back[1]


def test_a_parameter_stays_one_and_a_module_works() -> None:
    layer = torch.nn.Linear(3, 2)
    back = travel(layer)
    assert isinstance(back.weight, torch.nn.Parameter)
    assert back.weight.requires_grad
    assert torch.equal(back(torch.ones(3)), layer(torch.ones(3)))


def test_what_pickle_refuses_is_named() -> None:
    with pytest.raises(PayloadError, match="generator"):
        encode(value for value in ())


def test_the_fallback_takes_what_plain_pickle_cannot_name() -> None:
    calls: list[object] = []

    def fallback(obj: object, callback: Any, reduce: Any) -> bytes:
        import pickle

        calls.append(obj)
        return pickle.dumps("from the fallback", protocol=5)

    function = lambda: None  # noqa: E731 - the kind of object under test
    assert travel(function, fallback=fallback) == "from the fallback"
    assert travel(1, fallback=fallback) == 1
    assert calls == [function]
    # Its name would mean something else in another process.
    kind = type("FrameKind", (), {"__module__": "__main__"})
    main = sys.modules["__main__"]
    main.FrameKind = kind  # type: ignore[attr-defined]
    try:
        assert travel(kind(), fallback=fallback) == "from the fallback"
    finally:
        del main.FrameKind  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numpy_1_reads_arrays_of_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode([np.arange(3)])
    if b"numpy._core.numeric" not in encoded.head:
        pytest.skip("this numpy pickles arrays by other names")
    buffers = [part.view() for part in encoded.parts]
    # As in numpy 1, which has no such modules.
    for name in ("numeric", "multiarray"):
        monkeypatch.setitem(sys.modules, f"numpy._core.{name}", None)
    (back,) = decode(encoded.head, buffers)
    assert back.tolist() == [0, 1, 2]


def test_without_torch_a_tensor_becomes_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    array = rebuild_tensor(bytearray(np.arange(4, dtype=np.float32).tobytes()), "float32", (2, 2), ("cpu", None))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(PayloadError, match="bfloat16") as caught:
        rebuild_tensor(bytearray(4), "bfloat16", (2,), ("cpu", None))
    assert sys.executable in str(caught.value)


def test_a_dtype_that_a_package_adds_to_numpy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ml_dtypes")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PayloadError, match="numpy has no such dtype"):
        rebuild_tensor(bytearray(4), "bfloat16", (2,), ("cpu", None))


def test_a_tensor_of_a_device_that_is_not_here_comes_to_the_host() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is such a device here")
    back = rebuild_tensor(bytearray(8), "float32", (2,), ("cuda", 3))
    assert isinstance(back, torch.Tensor)
    assert back.device.type == "cpu"


@pytest.mark.parametrize("buffer", [torch.zeros(2, 3), torch.zeros(3, 2).t(), np.zeros((2, 3), np.float32)])
def test_a_buffer_is_filled_in_place(buffer: Any) -> None:
    target = TensorTarget(buffer)
    assert str(target) == "float32[2, 3]"
    target.fill(memoryview(bytearray(np.arange(6, dtype=np.float32).tobytes())))
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_is_copied_by_its_sender() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    copied: list[torch.Size] = []

    def copy(target: torch.Tensor) -> None:
        copied.append(target.shape)
        target.copy_(tensor + 1)

    back = travel({"piece": CustomCopy(tensor, copy), "plain": tensor})
    assert copied == [tensor.shape]
    assert torch.equal(back["piece"], tensor + 1)
    assert torch.equal(back["plain"], tensor)


def test_a_tensor_that_is_not_contiguous_is_copied_as_any_other() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    back = travel(CustomCopy(tensor, lambda _: pytest.fail("its bytes do not lie in one piece")))
    assert torch.equal(back, tensor)
