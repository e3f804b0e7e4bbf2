"""send, recv, send_tensor and recv_tensor between two processes of one host."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import CommunicationTimeoutError, MismatchError, PayloadError

THERE = WorkerAddress("there", 0)


def echo(side: Any, times: int) -> None:
    group = side.group()
    here = WorkerAddress("here", 0)
    for _ in range(times):
        group.send(group.recv(here), here)


def round_trip(duo: Any, obj: object) -> Any:
    here, there = duo
    group = here.group()
    there.begin(echo, 1)
    group.send(obj, THERE)
    back = group.recv(THERE)
    there.result()
    return back


@pytest.mark.parametrize(
    "obj",
    [
        None,
        "text",
        b"x" * 100_000,
        {"a": [1, (2, 3)], "b": {4}},
        OrderedDict(x=1),
        list(range(20_000)),
    ],
    ids=["none", "text", "bytes", "nested", "ordered", "long-list"],
)
def test_any_object_comes_back(duo: Any, obj: object) -> None:
    back = round_trip(duo, obj)
    assert back == obj
    assert type(back) is type(obj)


@pytest.mark.parametrize("count", [3, 5_000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_tensors_of_every_size_and_dtype_come_back(duo: Any, dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 3).to(dtype)
    back = round_trip(duo, tensor)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    back.fill_(1)


def test_unusual_tensors_come_back(duo: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensors = {
        "zero-dimensional": torch.tensor(7.0),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "strided": torch.arange(100_000).reshape(100, 1000).t()[::2],
        "gradient": leaf * 2,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "array": np.arange(12).reshape(3, 4)[:, ::2],
        "large array": np.ones((1000, 1000)),
    }
    back = round_trip(duo, tensors)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape, name
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(back[name], tensor.detach()), name
            assert not back[name].requires_grad
        else:
            assert np.array_equal(back[name], tensor), name
            back[name][0] = 5


def test_the_sender_may_change_what_it_sent(duo: Any) -> None:
    here, there = duo
    group = here.group()
    tensor = torch.zeros(1_000_000)
    group.send(tensor, THERE)
    tensor.fill_(1)
    there.begin(echo, 1)
    assert group.recv(THERE).sum() == 0
    there.result()


def test_what_was_received_stays_as_it_is(duo: Any) -> None:
    kept = [round_trip(duo, torch.full((500_000,), float(value))) for value in range(8)]
    assert [tensor[0].item() for tensor in kept] == list(range(8))
    assert all(bool((tensor == tensor[0]).all()) for tensor in kept)


def send_in_order(side: Any, count: int) -> None:
    import torch

    group = side.group()
    here = WorkerAddress("here", 0)
    works = []
    for number in range(count):
        size = (10, 20_000, 600_000)[number % 3]
        payload = (number, torch.full((size,), float(number)))
        work = group.send(payload, here, async_op=number % 2 == 0)
        works.append((work, payload))
    for work, _ in works:
        if work is not None:
            work.wait()


def test_messages_keep_their_order_whatever_their_size_and_kind(duo: Any) -> None:
    here, there = duo
    group = here.group()
    there.begin(send_in_order, 30)
    works = [group.recv(THERE, async_op=True) for _ in range(10)]
    got = [work.wait() for work in works] + [group.recv(THERE) for _ in range(20)]
    there.result()
    assert [number for number, _ in got] == list(range(30))
    assert all(bool((tensor == number).all()) for number, tensor in got)


def test_a_tensor_is_received_in_place(duo: Any) -> None:
    here, there = duo

    def send(side: Any) -> None:
        import torch

        group = side.group()
        here = WorkerAddress("here", 0)
        group.send_tensor(torch.arange(6, dtype=torch.float32), here)
        group.send_tensor(torch.ones(300, 300).t(), here)
        group.send_tensor(torch.ones(2_000_000, dtype=torch.bfloat16), here)

    there.begin(send)
    group = here.group()
    small = torch.zeros(2, 3)
    assert group.recv_tensor(small, THERE) is small
    assert small.tolist() == [[0, 1, 2], [3, 4, 5]]
    strided = torch.zeros(300, 600)[:, ::2]
    group.recv_tensor(strided, THERE)
    assert strided.sum() == 90_000
    large = torch.zeros(2_000_000, dtype=torch.bfloat16)
    work = group.recv_tensor(large, THERE, async_op=True)
    assert work.wait() is large
    assert bool((large == 1).all())
    there.result()


def send_tensor_and_go_on(side: Any, shape: tuple[int, ...]) -> bool:
    import torch

    group = side.group()
    here = WorkerAddress("here", 0)
    group.send_tensor(torch.ones(shape), here)
    group.recv(here)
    group.send("after", here)
    return group.settle(30)


def take_mismatches(side: Any) -> list[MismatchError]:
    return side.endpoint.take_mismatches()


@pytest.mark.parametrize("buffer", [torch.zeros(8), torch.zeros(4, dtype=torch.int32)], ids=["size", "dtype"])
def test_mismatch_fails_both_sides_and_costs_one_message(duo: Any, buffer: torch.Tensor) -> None:
    here, there = duo
    group = here.group()
    there.begin(send_tensor_and_go_on, (4,))
    with pytest.raises(MismatchError, match=r"float32\[4\]"):
        group.recv_tensor(buffer, THERE)
    assert not buffer.any()
    group.send("go on", THERE)
    assert group.recv(THERE) == "after", "the operations after a mismatch are sound"
    with pytest.raises(MismatchError, match=r"float32\[4\]"):
        there.result()


def test_a_mismatch_fails_the_handle_of_an_asynchronous_send(duo: Any) -> None:
    here, there = duo

    def receive(side: Any) -> str:
        import torch

        from rlinf_core.errors import MismatchError

        group = side.group()
        try:
            group.recv_tensor(torch.zeros(5), WorkerAddress("here", 0))
        except MismatchError as error:
            return str(error)
        return ""

    group = here.group()
    there.begin(receive)
    work = group.send_tensor(torch.zeros(4), THERE, async_op=True)
    with pytest.raises(MismatchError, match=r"float32\[5\]"):
        work.wait()
    assert "float32[4]" in there.result()


def test_send_does_not_meet_recv_tensor(duo: Any) -> None:
    here, there = duo

    def send(side: Any) -> None:
        side.group().send("an object", WorkerAddress("here", 0))

    there.call(send)
    group = here.group()
    with pytest.raises(MismatchError, match="recv_tensor"):
        group.recv_tensor(torch.zeros(1), THERE)
    # The answer came before what is sent now, and does not spoil it.
    assert round_trip(duo, 1) == 1
    assert [error.sent for error in there.call(take_mismatches)] == ["an object with `send`"]


def test_unpicklable_object_fails_the_sender_alone(duo: Any) -> None:
    here, _ = duo
    with pytest.raises(PayloadError, match="cannot be pickled"):
        here.group().send(threading.Lock(), THERE)
    assert round_trip(duo, "still fine") == "still fine"


def test_an_object_that_cannot_be_rebuilt_is_the_receivers_error(duo: Any) -> None:
    here, there = duo

    def send(side: Any) -> None:
        import sys
        import types

        module = types.ModuleType("only_there")
        module.Thing = type("Thing", (), {"__module__": "only_there"})
        sys.modules["only_there"] = module
        side.group().send(module.Thing(), WorkerAddress("here", 0))
        side.group().send("next", WorkerAddress("here", 0))

    there.call(send)
    group = here.group()
    with pytest.raises(PayloadError, match="only_there"):
        group.recv(THERE)
    assert group.recv(THERE) == "next"


def test_a_receive_that_timed_out_takes_no_message(duo: Any) -> None:
    here, _ = duo
    with pytest.raises(CommunicationTimeoutError, match="recv from there:0"):
        here.group().recv(THERE, timeout=0.05)
    assert round_trip(duo, 5) == 5


def test_what_is_no_buffer_is_refused(duo: Any) -> None:
    here, _ = duo
    with pytest.raises(PayloadError, match="fills a tensor or an array, not a `list`"):
        here.group().recv_tensor([1, 2], THERE)


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), "3", torch.tensor(1.0), np.ones(2)], ids=str)
def test_what_is_no_time_is_refused_before_anything_is_sent(duo: Any, timeout: Any) -> None:
    here, there = duo
    group = here.group()
    for operation in (
        lambda: group.send("lost", THERE, timeout=timeout),
        lambda: group.send(threading.Lock(), THERE, timeout=timeout),
        lambda: group.broadcast("lost", here.me, timeout=timeout),
        lambda: group.recv(THERE, timeout=timeout),
        lambda: group.recv_tensor(torch.ones(1), THERE, async_op=True, timeout=timeout),
        lambda: group.send_tensor(torch.ones(1), THERE, timeout=timeout),
    ):
        with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
            operation()
    there.begin(echo, 1)
    group.send("kept", THERE)
    assert group.recv(THERE) == "kept"
    there.result()


def test_handles_are_awaited_without_polling(duo: Any) -> None:
    here, there = duo
    group = here.group()
    there.begin(echo, 3)

    async def exchange() -> list[Any]:
        receives = [group.recv(THERE, async_op=True) for _ in range(3)]
        sends = [group.send(torch.full((400_000,), float(n)), THERE, async_op=True) for n in range(3)]
        await asyncio.gather(*(work.async_wait() for work in sends))
        return await asyncio.gather(*(work.async_wait() for work in receives))

    assert [tensor[0].item() for tensor in asyncio.run(exchange())] == [0, 1, 2]
    there.result()


def test_then_chains_and_carries_failures(duo: Any) -> None:
    here, there = duo
    group = here.group()
    there.begin(echo, 2)
    doubled = group.recv(THERE, async_op=True).then(lambda value: value * 2)
    failed = group.recv(THERE, async_op=True).then(lambda value: value.missing)
    group.send(21, THERE)
    group.send(1, THERE)
    assert doubled.wait() == 42
    with pytest.raises(AttributeError):
        failed.wait()
    there.result()


def test_many_threads_share_the_connection(duo: Any) -> None:
    here, there = duo
    group = here.group()
    there.begin(echo, 80)
    got: list[Any] = []

    def one(number: int) -> None:
        for _ in range(20):
            group.send(number, THERE)
            got.append(group.recv(THERE))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there.result()
    assert sorted(got) == sorted(list(range(4)) * 20)


Point = namedtuple("Point", "x y")


def test_within_one_process_the_receiver_gets_a_copy(duo: Any) -> None:
    here, _ = duo
    me = WorkerAddress("here", 0)
    group = here.group()
    for size in (10, 500_000):
        tensor = torch.zeros(size)
        group.send(Point(tensor, "y"), me)
        tensor.fill_(1)
        back = group.recv(me)
        assert isinstance(back, Point)
        assert back.x.sum() == 0
        buffer = torch.zeros(size)
        group.send_tensor(tensor, me)
        group.recv_tensor(buffer, me)
        assert buffer.sum() == size


def test_a_view_that_is_dropped_is_free_at_once(duo: Any) -> None:
    here, there = duo

    def send(side: Any) -> int:
        import torch

        before = side.endpoint.shared_memory().used
        side.group().send({"nested": [torch.ones(500_000)]}, WorkerAddress("here", 0))
        return before

    def used(side: Any) -> int:
        return side.endpoint.shared_memory().used

    before = there.call(send)
    # No garbage collection in between: nothing may hold the message in a cycle.
    gc.disable()
    try:
        value = here.group().recv(THERE)
        assert there.call(used) > before
        del value
        assert there.call(used) == before
    finally:
        gc.enable()
