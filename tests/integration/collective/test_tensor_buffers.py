"""What `send_tensor` takes and `recv_tensor` fills: what does not fit is an error, never other numbers."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import MismatchError, PayloadError
from tests.integration.collective.conftest import THERE, echo, receive

FIELDS: Any = [("a", "<i4"), ("b", "<f4")]
# Inside the frame, and beside it: in shared memory, or straight into the buffer.
SIZES = pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])


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
def test_misread_bytes_fail_both_sides(two_ways: Any, kind: str, size: int) -> None:
    here, there = two_ways
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
def test_bytes_that_mean_the_same_arrive(two_ways: Any, kind: str, size: int) -> None:
    here, there = two_ways
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


def test_objects_keep_their_order_of_bytes_and_their_fields(two_ways: Any) -> None:
    here, there = two_ways
    arrays = [np.arange(4, dtype=">f4"), np.ones(50_000, FIELDS), np.array(["2020-01-01"], "M8[D]")]

    there.begin(echo, 1)
    here.group().send(arrays, THERE)
    back = here.group().recv(THERE)
    there.result()
    for array, other in zip(arrays, back, strict=True):
        assert array.dtype == other.dtype
        assert np.array_equal(array, other)


@SIZES
def test_unfillable_buffer_is_refused_and_keeps_the_message(two_ways: Any, size: int) -> None:
    here, there = two_ways
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
def test_a_conjugate_buffer_reads_as_what_was_sent(two_ways: Any, size: int) -> None:
    here, there = two_ways
    buffer = torch.zeros(size, dtype=torch.complex64).conj()
    work = here.group().recv_tensor(buffer, THERE, async_op=True)
    sent = np.full(size, 1 + 2j, np.complex64)
    there.begin(send, sent.tobytes(), "c8")
    work.wait()
    assert there.result()
    assert bool((buffer == torch.from_numpy(sent)).all())


def test_unsendable_tensor_is_refused_and_sends_nothing(two_ways: Any) -> None:
    here, there = two_ways
    group = here.group()
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse(), np.array([None])):
        for async_op in (False, True):
            with pytest.raises(PayloadError):
                group.send_tensor(tensor, THERE, async_op=async_op)
    group.send("next", THERE)
    assert there.call(receive) == "next"


OPERATIONS = 40
# Elements of uint8: inside the frame, beside it, and large enough to be received while it is being sent.
COUNTS = (5, 70_000, 20 << 20)
# (who sends, (kind, count, async_op) of the send, the same of the receive); kinds: object or tensor.
Step = tuple[str, tuple[str, int, bool], tuple[str, int, bool]]


def random_steps(seed: int) -> list[Step]:
    choose = random.Random(seed)
    steps: list[Step] = []
    for _ in range(OPERATIONS):
        count = choose.choices(COUNTS, (8, 4, 1))[0]
        kind = choose.choice(("object", "tensor"))
        sent = (kind, count, choose.random() < 0.5)
        received = (kind, count, choose.random() < 0.5)
        if choose.random() < 0.4:
            other = choose.choice(("object", "tensor"))
            received = (other, choose.choice((count, count + 1, 3)), received[2])
        steps.append((choose.choice(("here", "there")), sent, received))
    return steps


def fits(sent: tuple[str, int, bool], received: tuple[str, int, bool]) -> bool:
    return sent[0] == received[0] and (sent[0] == "object" or sent[1] == received[1])


def unraised(steps: list[Step], me: str) -> list[int]:
    """Return the steps in which this side sends what does not fit, and no handle raises it."""
    return [
        number
        for number, (sender, sent, received) in enumerate(steps)
        if sender == me and not fits(sent, received) and not (sent[2] and sent[0] == "tensor")
    ]


def play(side: Any, steps: list[Step], peer_name: str, reports: int) -> tuple[list[Any], list[Any], list[int]]:
    """Do this side's half of each step; return how the receives ended, the asynchronous sends, and all mismatches.

    A receive ends with the first element of what it got, a send with None, and either with the word "mismatch".
    `reports` mismatches are waited for.
    """
    import time

    import torch

    from rlinf_core.errors import MismatchError

    def outcome(get: Any) -> Any:
        try:
            return get()
        except MismatchError:
            return "mismatch"

    def element(value: Any) -> int:
        return int(value[0])

    group = side.group()
    peer = WorkerAddress.from_name(peer_name)
    me = side.me.root_group_name
    receives: list[Any] = []
    sends: list[Any] = []
    for number, (sender, sent, received) in enumerate(steps):
        kind, count, async_op = sent if sender == me else received
        if sender == me:
            tensor = torch.full((count,), number, dtype=torch.uint8)
            send = group.send if kind == "object" else group.send_tensor
            work = send(tensor, peer, async_op=async_op)
            if work is not None:
                # It is kept: an asynchronous send's tensor must not change before it has finished.
                sends.append((number, work, tensor))
        else:
            buffer = torch.full((count,), 255, dtype=torch.uint8)
            if async_op:
                work = (
                    group.recv(peer, async_op=True)
                    if kind == "object"
                    else group.recv_tensor(buffer, peer, async_op=True)
                )
                receives.append((number, lambda work=work: element(work.wait())))
            else:
                value = outcome(
                    lambda kind=kind, buffer=buffer: element(
                        group.recv(peer) if kind == "object" else group.recv_tensor(buffer, peer)
                    )
                )
                receives.append((number, lambda value=value: value))
    ends = [(number, outcome(get)) for number, get in receives]
    handles = [(number, outcome(work.wait)) for number, work, _ in sends]
    # Both sides have received all. Reports on this side's sends come by another connection, maybe after this.
    group.send("done", peer)
    group.recv(peer)
    late: list[int] = []
    end = time.monotonic() + 30
    while len(late) < reports and time.monotonic() < end:
        late += [1 for _ in side.endpoint.take_mismatches()]
        time.sleep(0.001)
    return ends, handles, late + [1 for _ in side.endpoint.take_mismatches()]


def collect_garbage(side: Any) -> None:
    """Drop what the tracebacks of the errors refer to."""
    import gc

    gc.collect()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_operation_after_a_mismatch_behaves_as_if_alone(two_ways: Any, seed: int) -> None:
    here, there = two_ways
    steps = random_steps(seed)
    there.begin(play, steps, "here:0", len(unraised(steps, "there")))
    results = {"here": play(here, steps, "there:0", len(unraised(steps, "here"))), "there": there.result()}
    for me, (receives, handles, late) in results.items():
        wanted = [(n, n if fits(s, r) else "mismatch") for n, (sender, s, r) in enumerate(steps) if sender != me]
        assert receives == wanted
        mine = [(n, s, r) for n, (sender, s, r) in enumerate(steps) if sender == me]
        # The handle of an object's send finishes when its memory may be changed, before it meets a receive.
        assert handles == [(n, None if fits(s, r) or s[0] == "object" else "mismatch") for n, s, r in mine if s[2]]
        assert len(late) == len(unraised(steps, me)), "a mismatch that no handle raised is reported once"
    gc.collect()
    there.call(collect_garbage)
    assert here.endpoint.shared_memory().used == 0, "what was refused is given back"
