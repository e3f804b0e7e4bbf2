"""Frames, and reading them from a stream however it is cut."""

from __future__ import annotations

import os
import resource
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.collective.frame import (
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
from tests.waiting import until

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
    data = b"".join(
        frame.pack() + (b"" if frame.flags & Flag.SHARED else bytes(n % 251 for n in range(frame.body_size)))
        for frame in sent
    )

    def write() -> None:
        at = turn = 0
        while at < len(data):
            size = cuts[turn % len(cuts)]
            ours.sendall(data[at : at + size])
            at, turn = at + size, turn + 1
        ours.close()

    writing = threading.Thread(target=write)
    writing.start()
    reader = FrameReader(theirs)
    for frame in sent:
        assert reader.read() == frame
        if frame.body_size and not frame.flags & Flag.SHARED:
            body = memoryview(bytearray(frame.body_size))
            reader.read_body(body, lambda: None)
            assert body == bytes(n % 251 for n in range(frame.body_size))
    with pytest.raises(EOFError):
        reader.read()
    writing.join()
    theirs.close()


def test_reader_sleeps_while_its_peer_reads() -> None:
    ours, theirs = socket.socketpair()

    def read() -> None:
        with pytest.raises(EOFError):
            FrameReader(theirs).read()

    thread = threading.Thread(target=read)
    thread.start()

    def switches() -> int:
        """Return how often the thread went to sleep, once it sleeps."""
        status: dict[str, str] = {}

        def asleep() -> bool:
            lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
            status.update(line.split(":\t", 1) for line in lines)
            return status["State"].startswith("S")

        until(asleep)
        return int(status["voluntary_ctxt_switches"])

    before = last = switches()
    for _ in range(40):
        theirs.send(b"a message")
        ours.recv(100)
        last = switches()
    ours.close()
    thread.join()
    theirs.close()
    # It may have slept before it began to read.
    assert last - before < 10


def test_descriptor_that_finds_no_place_is_named() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [Frame(FrameKind.MESSAGE).pack()], [ours.fileno(), theirs.fileno()])
        reader = FrameReader(theirs)
        free = os.dup(0)
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="no file descriptor left"):
                reader.read()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        reader.close()
        os.close(os.dup(0))
