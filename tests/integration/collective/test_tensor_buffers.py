"""What `send_tensor` takes and what `recv_tensor` fills: whatever does not fit is an error, never other numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import MismatchError

THERE = WorkerAddress("there", 0)
FIELDS: Any = [("a", "<i4"), ("b", "<f4")]
# Inside the frame, and beside it: in shared memory, or straight into the buffer.
SIZES = pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])


@pytest.fixture(scope="module", params=["unix", "tcp"])
def duo(request: pytest.FixtureRequest, make_duo: Any) -> tuple[Any, Any]:
    """This process and one peer, on one host or as if on two."""
    here, there = make_duo()
    if request.param == "tcp":
        here.connector.cards[THERE] = replace(here.connector.cards[THERE], unix_path=None)
    here.group().send("the connection is made from here", THERE)
    there.call(receive)
    return here, there


def receive(side: Any) -> Any:
    return side.group().recv(WorkerAddress("here", 0))


def send(side: Any, data: bytes, dtype: Any) -> bool:
    """Sends one array, and waits until it is known whether it fitted."""
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
def test_bytes_that_mean_something_else_are_an_error_on_both_sides(duo: Any, kind: str, size: int) -> None:
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
