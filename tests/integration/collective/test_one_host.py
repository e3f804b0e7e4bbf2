"""What two processes of one host cost each other: one connection, and no byte of a payload on it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.collective import handshake
from tests.integration.collective.conftest import THERE

PAYLOAD = 16 << 20
# Handshake, headers and acknowledgements of one message, and what this process says elsewhere meanwhile.
A_FEW_WORDS = 64 << 10


def connections(side: Any) -> int:
    return len(side.endpoint._connections.all())


def answer(side: Any, times: int) -> int:
    """Take what has come and answer as often; the sum of what came."""
    group = side.group()
    here = WorkerAddress("here", 0)
    total = sum(group.recv(here) for _ in range(times))
    for number in range(times):
        group.send(number, here)
    return total


def test_a_first_contact_from_many_threads_is_one_connection(make_cast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    group = cast.here.group()
    issued = threading.Event()
    dial, dials = handshake.dial, []

    def dial_once_all_is_issued(sock: Any, secret: Any, mine: handshake.PeerIdentity, deadline: float) -> Any:
        # Other tests of this process may have an endpoint of their own open.
        if mine.seeks == there.info.incarnation:
            dials.append(mine)
            assert issued.wait(30)
        return dial(sock, secret, mine, deadline)

    monkeypatch.setattr(handshake, "dial", dial_once_all_is_issued)
    receives = [group.recv(THERE, async_op=True) for _ in range(4)]
    sends = [group.send(number, THERE, async_op=True) for number in range(4)]
    threads = [threading.Thread(target=group.send, args=(10, THERE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    issued.set()
    for thread in threads:
        thread.join()
    for work in sends:
        work.wait()
    # Only now does the other side do anything that it needs a connection for.
    assert there.call(answer, 8) == 46
    assert [work.wait() for work in receives] == [0, 1, 2, 3]
    assert [group.recv(THERE) for _ in range(4)] == [4, 5, 6, 7]
    assert len(dials) == 1
    assert (connections(cast.here), there.call(connections)) == (1, 1)


def talk(side: Any, other: str) -> list[int]:
    """First sends and first receives, each in a thread of its own."""
    import threading

    peer = WorkerAddress.from_name(other)
    group = side.group()
    got = []
    threads = [threading.Thread(target=group.send, args=(number, peer)) for number in range(4)]
    threads += [threading.Thread(target=lambda: got.append(group.recv(peer))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(got)


def test_a_first_contact_from_both_sides_is_hardly_more(make_cast: Any) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    there.begin(talk, "here:0")
    assert talk(cast.here, "there:0") == [0, 1, 2, 3]
    assert there.result() == [0, 1, 2, 3]
    # Where both dial at the same moment, both may be welcomed.
    assert 1 <= connections(cast.here) <= 2
    assert 1 <= there.call(connections) <= 2


def count_sockets(side: Any) -> None:
    """From now on what this process writes to sockets, and reads from them, is added up."""
    import socket

    side.kept["written"] = side.kept["read"] = 0

    def counted(name: str, way: str) -> None:
        plain = getattr(socket.socket, name)

        def count(*args: Any) -> Any:
            result = plain(*args)
            moved = result[0] if isinstance(result, tuple) else result
            side.kept[way] += moved if isinstance(moved, int) else len(moved)
            return result

        setattr(socket.socket, name, count)

    for name in ("send", "sendto", "sendmsg"):
        counted(name, "written")
    for name in ("recv", "recv_into", "recvfrom", "recvmsg", "recvmsg_into"):
        counted(name, "read")


def counts(side: Any) -> tuple[int, int]:
    return side.kept["written"], side.kept["read"]


def give(side: Any, kind: str, size: int) -> None:
    group = side.group()
    tensor = torch.full((size,), 7, dtype=torch.uint8)
    if kind == "tensor":
        group.send(tensor, THERE)
    elif kind == "tensor for a buffer":
        group.send_tensor(tensor, THERE)
    elif kind == "broadcast":
        group.broadcast(tensor, group.me)
    elif kind == "nested tensors":
        group.send({"array": np.full(size // 2, 7, dtype=np.uint8), "list": [tensor[: size // 2]]}, THERE)
    else:
        group.send(("\7" * (size // 2), b"\7" * (size // 2)), THERE)


def take(side: Any, kind: str, size: int) -> int:
    """Return how many bytes came as they were sent."""
    import torch

    group = side.group()
    here = WorkerAddress("here", 0)
    if kind == "tensor for a buffer":
        buffer = torch.zeros(size, dtype=torch.uint8)
        group.recv_tensor(buffer, here)
        return int((buffer == 7).sum())
    if kind == "broadcast":
        return int((group.broadcast(None, here) == 7).sum())
    came = group.recv(here)
    if kind == "tensor":
        return int((came == 7).sum())
    if kind == "nested tensors":
        return int((came["array"] == 7).sum()) + int((came["list"][0] == 7).sum())
    return came[0].count("\7") + came[1].count(b"\7")


def test_no_byte_of_a_payload_crosses_a_socket(make_cast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    there.call(count_sockets)
    # What is set now is taken back at the end, with what is counted from now on.
    for name in ("send", "sendto", "sendmsg", "recv", "recv_into", "recvfrom", "recvmsg", "recvmsg_into"):
        monkeypatch.setattr(socket.socket, name, getattr(socket.socket, name))
    count_sockets(cast.here)
    crossed = {}
    for kind in ("tensor", "tensor for a buffer", "broadcast", "nested tensors", "plain object"):
        before = *counts(cast.here), *there.call(counts)
        there.begin(take, kind, PAYLOAD)
        give(cast.here, kind, PAYLOAD)
        assert there.result() == PAYLOAD
        after = *counts(cast.here), *there.call(counts)
        crossed[kind] = max(end - start for start, end in zip(before, after, strict=True))
    # Each is announced through the socket: what is counted is the way that it takes.
    assert all(0 < item < A_FEW_WORDS for item in crossed.values()), crossed
