"""Random sequences of sound and mismatched operations: each fails or succeeds by itself, whatever came before it."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress

THERE = WorkerAddress("there", 0)
OPERATIONS = 40
# Elements of uint8: inside the frame, beside it, and large enough to be received while it is being sent.
COUNTS = (5, 70_000, 20 << 20)
# (who sends, (kind, count, async_op) of the send, the same of the receive); kinds: object or tensor.
Step = tuple[str, tuple[str, int, bool], tuple[str, int, bool]]


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


def play(side: Any, steps: list[Step], peer_name: str) -> tuple[list[Any], list[Any], list[int]]:
    """Do this side's half of each step; return how the receives ended, the asynchronous sends, and all mismatches.

    A receive ends with the first element of what it got, a send with None, and either with the word "mismatch".
    """
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
    # Both sides have received all: what each was told of its own sends comes before this.
    group.send("done", peer)
    group.recv(peer)
    return ends, handles, [1 for _ in side.endpoint.take_mismatches()]


def collect_garbage(side: Any) -> None:
    """Drop what the tracebacks of the errors refer to."""
    import gc

    gc.collect()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_operation_after_a_mismatch_behaves_as_if_alone(duo: Any, seed: int) -> None:
    here, there = duo
    steps = random_steps(seed)
    there.begin(play, steps, "here:0")
    results = {"here": play(here, steps, "there:0"), "there": there.result()}
    for me, (receives, handles, late) in results.items():
        wanted = [(n, n if fits(s, r) else "mismatch") for n, (sender, s, r) in enumerate(steps) if sender != me]
        assert receives == wanted
        mine = [(n, s, r) for n, (sender, s, r) in enumerate(steps) if sender == me]
        # The handle of an object's send finishes when its memory may be changed, before it meets a receive.
        assert handles == [(n, None if fits(s, r) or s[0] == "object" else "mismatch") for n, s, r in mine if s[2]]
        silent = [n for n, s, r in mine if not fits(s, r) and not (s[2] and s[0] == "tensor")]
        assert len(late) == len(silent), "a mismatch that no handle raised is reported once"
    gc.collect()
    there.call(collect_garbage)
    assert here.endpoint.shared_memory().used == 0, "what was refused is given back"
