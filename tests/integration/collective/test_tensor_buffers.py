"""What `send_tensor` takes and what `recv_tensor` fills: whatever does not fit is an error, never other numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import MismatchError, PayloadError

THERE = WorkerAddress("there", 0)
FIELDS: Any = [("a", "<i4"), ("b", "<f4")]
# Inside the frame, and beside it: in shared memory, or straight into the buffer.
SIZES = pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])


@pytest.fixture(scope="module", params=["unix", "tcp"])
def duo(request: pytest.FixtureRequest, make_duo: Any) -> tuple[Any, Any]:
    """This process and one peer, on one host or as if on two."""
    here, there = make_duo()
    if request.param == "tcp":
        here.resolver.endpoints[THERE] = replace(here.resolver.endpoints[THERE], unix_path=None)
    here.group().send("the connection is made from here", THERE)
    there.call(receive)
    return here, there


def receive(side: Any) -> Any:
    return side.group().recv(WorkerAddress("here", 0))


def send(side: Any, data: bytes, dtype: Any) -> bool:
    """Send one array, and wait until it is known whether it fitted."""
    import numpy as np

    group = side.group()
    group.send_tensor(np.frombuffer(data, dtype), WorkerAddress("here", 0))
    return group.settle(30)


WRONG = {
    "order": (">f4", np.zeros(1, "<f4")),
    "order-torch": (">f4", torch.zeros(1)),
    "order-back": ("<i8", np.zeros(1, ">i8")),
    "fields": (FIELDS, np.zeros(1, FIELDS[::-1])),
    "fields-torch": (FIELDS, torch.zeros(1, dtype=torch.int64)),
    "unit": ("M8[s]", np.zeros(1, "M8[D]")),
}


@SIZES
@pytest.mark.parametrize("kind", WRONG)
def test_misread_bytes_fail_both_sides(duo: Any, kind: str, size: int) -> None:
    here, there = duo
    dtype, one = WRONG[kind]
    buffer: Any = one.repeat(size)
    work = here.group().recv_tensor(buffer, THERE, async_op=True)
    there.begin(send, b"\1" * size * np.dtype(dtype).itemsize, dtype)
    with pytest.raises(MismatchError, match="receiver expects"):
        work.wait()
    assert bool((buffer == one).all())
    with pytest.raises(MismatchError, match="receiver expects"):
        there.result()


RIGHT = {
    "order": (">f4", np.zeros(1, ">f4")),
    "fields": (FIELDS, np.zeros(1, FIELDS)),
    "unit": ("M8[s]", np.zeros(1, "M8[s]")),
    "text": ("U1", np.zeros(1, "U1")),
    "numpy-torch": ("f4", torch.zeros(1)),
}


@SIZES
@pytest.mark.parametrize("kind", RIGHT)
def test_bytes_that_mean_the_same_arrive(duo: Any, kind: str, size: int) -> None:
    here, there = duo
    dtype, one = RIGHT[kind]
    sent = (np.arange(size * np.dtype(dtype).itemsize) % 2).astype(np.uint8).view(dtype)
    if kind == "text":
        sent = np.full(size, "ä", dtype)
    buffer: Any = one.repeat(size)
    work = here.group().recv_tensor(buffer, THERE, async_op=True)
    there.begin(send, sent.tobytes(), dtype)
    assert work.wait() is buffer
    assert there.result()
    assert np.asarray(buffer).tobytes() == sent.tobytes()


def test_objects_keep_their_order_of_bytes_and_their_fields(duo: Any) -> None:
    here, there = duo
    arrays = [np.arange(4, dtype=">f4"), np.ones(50_000, FIELDS), np.array(["2020-01-01"], "M8[D]")]

    def answer(side: Any) -> None:
        group = side.group()
        group.send(group.recv(WorkerAddress("here", 0)), WorkerAddress("here", 0))

    there.begin(answer)
    here.group().send(arrays, THERE)
    back = here.group().recv(THERE)
    there.result()
    for array, other in zip(arrays, back, strict=True):
        assert array.dtype == other.dtype
        assert np.array_equal(array, other)


@SIZES
def test_unfillable_buffer_is_refused_and_keeps_the_message(duo: Any, size: int) -> None:
    here, there = duo
    group = here.group()
    read_only = np.zeros(size, np.float32)
    read_only.flags.writeable = False
    there.begin(send, b"\1" * size * 4, "f4")
    for buffer, words in ((read_only, "read-only"), (torch.zeros(1).expand(size), "share memory")):
        for async_op in (False, True):
            with pytest.raises(PayloadError, match=words):
                group.recv_tensor(buffer, THERE, async_op=async_op)
    good = np.zeros(size, np.float32)
    group.recv_tensor(good, THERE)
    assert there.result()
    assert good.tobytes() == b"\1" * size * 4


@SIZES
def test_a_conjugate_buffer_reads_as_what_was_sent(duo: Any, size: int) -> None:
    here, there = duo
    buffer = torch.zeros(size, dtype=torch.complex64).conj()
    work = here.group().recv_tensor(buffer, THERE, async_op=True)
    sent = np.full(size, 1 + 2j, np.complex64)
    there.begin(send, sent.tobytes(), "c8")
    work.wait()
    assert there.result()
    assert bool((buffer == torch.from_numpy(sent)).all())


def test_unsendable_tensor_is_refused_and_sends_nothing(duo: Any) -> None:
    here, there = duo
    group = here.group()
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse(), np.array([None])):
        for async_op in (False, True):
            with pytest.raises(PayloadError):
                group.send_tensor(tensor, THERE, async_op=async_op)
    group.send("next", THERE)
    assert there.call(receive) == "next"
