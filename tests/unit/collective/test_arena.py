"""The arena: blocks neither overlap nor get lost, whoever gives them back and in which order."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.arena import PAGE, Arena, spill

CAPACITY = 64 * PAGE


@pytest.fixture
def event():
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def new_arena(event: int, capacity: int = CAPACITY, free: int = 1 << 40) -> Arena:
    return Arena(capacity, event, lambda: free)


@given(st.lists(st.tuples(st.integers(1, 20 * PAGE), st.integers(1, 3), st.integers(0, 5)), max_size=60))
def test_blocks_never_overlap_and_all_come_back(steps: list[tuple[int, int, int]]) -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    arena = new_arena(event)
    held = []
    for size, holders, drop in steps:
        block = arena.try_allocate(size, [f"peer {n}" for n in range(holders)])
        if block is not None:
            assert block.size >= size
            for other, _ in held:
                assert block.offset + block.size <= other.offset or other.offset + other.size <= block.offset
            held.append((block, list(range(holders))))
        if held and drop < len(held):
            block, places = held[drop]
            block.lease(places.pop()).release()
            if not places:
                del held[drop]
        assert arena.use().used == sum(block.size for block, _ in held)
    for block, places in held:
        for place in places:
            block.lease(place).release()
    assert arena.use().used == 0
    # No fragment is lost: the whole of it fits again.
    assert arena.try_allocate(CAPACITY) is not None
    os.close(event)


def test_what_is_full_is_told_and_by_whom(event: int) -> None:
    arena = new_arena(event)
    assert arena.try_allocate(CAPACITY - PAGE, ["actor"]) is not None
    assert arena.try_allocate(2 * PAGE) is None
    assert arena.use().holders == {"actor": CAPACITY - PAGE}
    assert arena.segment.crowded()


def test_pages_are_taken_only_within_the_budget(event: int) -> None:
    arena = new_arena(event, free=4 * PAGE)
    assert arena.try_allocate(5 * PAGE) is None
    block = arena.try_allocate(4 * PAGE)
    assert block is not None
    block.lease().release()
    assert arena.try_allocate(4 * PAGE) is not None
    assert arena.use().committed == 4 * PAGE
    assert spill(8 * PAGE, 1, lambda: PAGE) is None


def test_a_view_is_memory_until_its_last_part_is_gone(event: int) -> None:
    arena = new_arena(event)
    block = arena.try_allocate(100)
    assert block is not None
    view = block.lease().view()
    part = view[10:20]
    part[:] = b"0123456789"
    del view
    gc.collect()
    assert arena.use().used == PAGE
    assert bytes(part) == b"0123456789"
    del part
    gc.collect()
    assert arena.use().used == 0


def test_private_view_keeps_its_changes_to_itself(event: int) -> None:
    arena = new_arena(event)
    block = arena.try_allocate(8 * PAGE, ["one", "two"])
    assert block is not None
    block.memory()[:] = b"a" * 8 * PAGE
    one = block.lease(0, private=True).view()
    one[3 * PAGE] = ord("x")
    assert bytes(block.memory()) == b"a" * 8 * PAGE
    del one
    gc.collect()
    block.memory()[:] = b"b" * 8 * PAGE
    two = block.lease(1, private=True).view()
    assert bytes(two) == b"b" * 8 * PAGE
    block.memory()[0] = ord("c")
    assert two[0] == ord("c"), "what was never written is not copied"
    del two
    gc.collect()
    assert arena.use().used == 0


def test_waiting_for_room_ends_with_a_release(event: int) -> None:
    arena = new_arena(event)
    block = arena.try_allocate(CAPACITY)
    assert block is not None
    threading.Timer(0.02, block.lease().release).start()
    deadline = time.monotonic() + 5
    while arena.try_allocate(PAGE) is None:
        assert time.monotonic() < deadline
        arena.wait_for_room(deadline)


def test_dead_owner_frees_what_it_held(event: int) -> None:
    arena = new_arena(event)
    kept, passed = arena.try_allocate(PAGE, ["dead"]), arena.try_allocate(PAGE, ["dead"])
    assert kept is not None
    assert passed is not None
    passed.lease().forward(77)
    dead = False
    arena.owner_lost("dead", lambda: dead)
    assert arena.use().used == 2 * PAGE
    dead = True
    assert arena.use().used == PAGE
    passed.lease().reclaim(78)
    assert arena.use().used == PAGE
    passed.lease().reclaim(77)
    assert arena.use().used == 0


def test_a_forked_child_gives_nothing_back(event: int) -> None:
    arena = new_arena(event)
    block = arena.try_allocate(PAGE)
    assert block is not None
    view = block.lease().view()
    child = os.fork()
    if not child:
        del view
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert arena.use().used == PAGE
    del view


def test_spilled_memory_is_gone_with_its_last_view() -> None:
    # What earlier tests left to be collected goes first.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    block = spill(10 * PAGE, 1)
    assert block is not None
    view = block.lease().view()
    del block
    view[0] = 1
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
