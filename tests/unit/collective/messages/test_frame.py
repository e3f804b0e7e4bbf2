"""Frames, and reading them from a stream however it is cut."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.messages.frame import (
    HEADER,
    Flag,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    SharedPlace,
    layout,
    unpack,
)

frames = st.builds(
    lambda key, head, sizes, route, sequence, weight, shared: Frame(
        FrameKind.MESSAGE,
        Flag.SHARED if shared else 0,
        tag=3,
        route=route,
        sequence=sequence,
        weight=weight,
        key=key,
        head=head,
        sizes=tuple(sizes),
        place=SharedPlace(2**62, 4096, 8192, 7) if shared else None,
        body_size=layout(sizes)[1],
    ),
    st.binary(max_size=40),
    st.binary(max_size=300),
    st.lists(st.integers(0, 500), max_size=5),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
)


@given(frames)
def test_a_frame_survives_packing(frame: Frame) -> None:
    data = b"before" + frame.pack()
    size = len(data) - 6
    assert unpack(data, 6, size) == (frame, size)
    assert unpack(data, 6, size - 1) == (None, size)


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_parts_are_aligned_and_apart(sizes: list[int]) -> None:
    offsets, total = layout(sizes)
    end = 0
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + size
    assert total == end


def test_what_is_no_frame_is_refused() -> None:
    for data in (b"GET / HTTP/1.1\r\n".ljust(HEADER.size), bytes(HEADER.size)):
        with pytest.raises(FrameError):
            unpack(data, 0, HEADER.size)
    huge = bytearray(Frame(FrameKind.MESSAGE).pack())
    huge[HEADER.size - 12 : HEADER.size - 8] = b"\xff\xff\xff\xff"
    with pytest.raises(FrameError, match="announces"):
        unpack(bytes(huge), 0, HEADER.size)


@given(st.lists(frames, min_size=1, max_size=6), st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_frames_are_read_however_the_stream_is_cut(sent: list[Frame], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    got: list[tuple[Frame, bytes]] = []
    reader = FrameReader(theirs, lambda frame: memoryview(bytearray(frame.body_size)))
    data = b"".join(
        frame.pack() + (b"" if frame.flags & Flag.SHARED else bytes(n % 251 for n in range(frame.body_size)))
        for frame in sent
    )
    at = turn = 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        ours.sendall(data[at : at + size])
        at, turn = at + size, turn + 1
        while reader.pump(lambda frame, body: got.append((frame, bytes(body or b"")))):
            pass
    ours.close()
    with pytest.raises(EOFError):
        reader.pump(lambda frame, body: None)
    theirs.close()
    assert [frame for frame, _ in got] == sent
    for frame, body in got:
        if not frame.flags & Flag.SHARED:
            assert body == bytes(n % 251 for n in range(frame.body_size))


def test_a_body_without_a_place_waits() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    places: list[memoryview | None] = [None, memoryview(bytearray(5))]
    got: list[bytes] = []
    reader = FrameReader(theirs, lambda frame: places.pop(0))
    body = Frame(FrameKind.MESSAGE, sizes=(5,), body_size=5)
    ours.sendall(body.pack() + b"12345" + Frame(FrameKind.GOODBYE).pack())

    def deliver(frame: Frame, body: memoryview | None) -> None:
        got.append(bytes(body or b""))

    assert reader.pump(deliver)
    assert reader.stalled is not None
    assert got == []
    assert reader.pump(deliver)
    assert got == [b"12345", b""]
    ours.close()
    theirs.close()
