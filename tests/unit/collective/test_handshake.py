"""Who may talk: the handshake, and the hall in front of it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective import handshake
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Settings, StaticResolver
from rlinf_core.collective.handshake import (
    Acceptance,
    Admission,
    ClusterSecret,
    Listener,
    PeerIdentity,
    listen_unix,
)
from rlinf_core.errors import AuthenticationError

pytestmark = pytest.mark.security

SECRET = ClusterSecret.generate()
DIALER, ACCEPTOR = PeerIdentity("d", "a", "c"), PeerIdentity("a", "d", "c")


def meet(dialer_secret: ClusterSecret, acceptor_secret: ClusterSecret) -> list[object]:
    ours, theirs = socket.socketpair()
    outcome: list[object] = []

    def accept() -> None:
        try:
            acceptance = Acceptance(theirs, acceptor_secret, time.monotonic() + 5)
            acceptance.answer(Admission.WELCOME, ACCEPTOR)
            outcome.append(acceptance.dialer)
        except (OSError, AuthenticationError) as error:
            outcome.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        outcome.append(handshake.dial(ours, dialer_secret, DIALER, time.monotonic() + 5))
    except (OSError, AuthenticationError) as error:
        outcome.append(error)
    ours.close()
    thread.join()
    return outcome


def test_members_learn_who_the_other_is() -> None:
    outcome = meet(SECRET, SECRET)
    assert DIALER in outcome
    assert (Admission.WELCOME, ACCEPTOR) in outcome


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    outcome = meet(ClusterSecret.generate(), SECRET)
    assert [type(one) for one in outcome] == [AuthenticationError, AuthenticationError]


def test_an_acceptor_must_prove_itself_too() -> None:
    ours, theirs = socket.socketpair()

    def impostor() -> None:
        theirs.recv(1000)
        theirs.sendall(b"rlinf data plane 1\n" + bytes(32))
        theirs.recv(1000)
        theirs.sendall(bytes([Admission.WELCOME]) + bytes(32) + b"\x02\x00{}")

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(AuthenticationError, match="does not belong"):
        handshake.dial(ours, SECRET, DIALER, time.monotonic() + 5)
    thread.join()
    ours.close()
    theirs.close()


def test_a_proof_holds_for_its_fields_alone() -> None:
    proof = SECRET.sign(b"dial", b"er")
    assert SECRET.verify(proof, b"dial", b"er")
    for fields in ((b"dia", b"ler"), (b"dialer",), (b"dial", b"er", b""), (b"er", b"dial")):
        assert not SECRET.verify(proof, *fields)
    assert not ClusterSecret.generate().verify(proof, b"dial", b"er")


def test_the_secret_is_in_no_text() -> None:
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr(Settings())):
        assert SECRET.key.hex() not in text
        assert repr(SECRET.key) not in text
    with pytest.raises(ValueError, match="16 bytes"):
        ClusterSecret(b"short")


@pytest.fixture
def endpoints() -> Iterator[Callable[..., Endpoint]]:
    made: list[Endpoint] = []

    def make(secret: ClusterSecret = SECRET, **settings: float) -> Endpoint:
        values = {"timeout": 5.0, "connect_timeout": 3.0, "arena_bytes": 1 << 20, **settings}
        made.append(Endpoint(secret, ip="127.0.0.1", settings=Settings(**values)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.info.tcp_host, endpoint.info.tcp_port), timeout=5)


def groups(one: Endpoint, two: Endpoint) -> tuple[CollectiveGroup, CollectiveGroup]:
    here, there = WorkerAddress("one", 0), WorkerAddress("two", 0)
    resolver = StaticResolver({here: one.info, there: two.info})
    return CollectiveGroup(one, here, [there], resolver), CollectiveGroup(two, there, [here], resolver)


def assert_talking(one: CollectiveGroup, two: CollectiveGroup) -> None:
    one.send("hello", two.me)
    assert two.recv(one.me) == "hello"
    two.send("hello back", one.me)
    assert one.recv(two.me) == "hello back"


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _explode, ()


def _explode() -> None:
    Bomb.exploded = True


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
        bytes(4096),
        pickle.dumps(Bomb()) * 20,
        b"rlinf data plane 1\n" + bytes(32) + bytes(32) + b"\xff\xff" + bytes(5000),
        b"rlinf data plane 1\n" + bytes(32) + bytes(32) + b"\x02\x00{}",
        b"rlinf data plane 1\n" + pickle.dumps(Bomb()).ljust(1000),
    ],
    ids=["http", "zeros", "pickle", "long-identity", "no-proof", "greeting-and-pickle"],
)
def test_a_stranger_gets_nothing_and_stops_nothing(endpoints: Callable[..., Endpoint], words: bytes) -> None:
    one, two = endpoints(), endpoints()
    with connect(one) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(words)
        assert_talking(*groups(one, two))
        received = b""
        with contextlib.suppress(OSError):
            while piece := stranger.recv(1000):
                received += piece
    # The greeting and a nonce are all that anybody learns.
    assert len(received) <= len(b"rlinf data plane 1\n") + 32
    assert not Bomb.exploded
    assert one.streams()
    assert {stream.peer for stream in one.streams()} == {"two:0"}


def test_what_was_recorded_cannot_be_used_again(endpoints: Callable[..., Endpoint]) -> None:
    one, two = endpoints(), endpoints()
    ours = connect(two)
    recorded = bytearray()

    class Recorder:
        def __init__(self, sock: socket.socket) -> None:
            self.settimeout, self.recv = sock.settimeout, sock.recv
            self._sock = sock

        def sendall(self, data: bytes) -> None:
            recorded.extend(data)
            self._sock.sendall(data)

    identity = PeerIdentity(one.info.incarnation, two.info.incarnation, "c")
    verdict, _ = handshake.dial(Recorder(ours), SECRET, identity, time.monotonic() + 5)  # type: ignore[arg-type]
    assert verdict is Admission.WELCOME
    with connect(two) as replay:
        replay.sendall(recorded)
        received = b""
        with contextlib.suppress(OSError):
            while piece := replay.recv(1000):
                received += piece
    assert len(received) == len(b"rlinf data plane 1\n") + 32
    ours.close()


def test_slow_handshakes_cost_bounded_threads(endpoints: Callable[..., Endpoint]) -> None:
    one, two = endpoints(pending_handshakes=8, handshake_timeout=30.0), endpoints()
    strangers = [connect(one) for _ in range(40)]
    # Where the unix socket serves, TCP strangers are not even in the same hall; so this one dials by TCP.
    here, there = WorkerAddress("one", 0), WorkerAddress("two", 0)
    from dataclasses import replace

    resolver = StaticResolver({here: replace(one.info, unix_path=None), there: two.info})
    group = CollectiveGroup(two, there, [here], resolver)
    group.send("through", here)
    other = CollectiveGroup(one, here, [there], resolver)
    assert other.recv(there) == "through"
    waiting = [thread for thread in threading.enumerate() if thread.name == "rlinf-handshake"]
    assert sum(len(room.waiting()) for room in one._listener._unproven.values()) <= 8
    assert len(waiting) <= 16
    for stranger in strangers:
        stranger.close()


def test_who_proved_membership_makes_no_room_for_strangers(tmp_path: Path) -> None:
    proven, evicted = threading.Event(), threading.Event()

    def admit(sock: socket.socket, acceptance: Acceptance) -> None:
        proven.set()
        evicted.wait(20)
        with sock:
            acceptance.answer(Admission.WELCOME, ACCEPTOR)

    path = str(tmp_path / "s")
    listener = Listener([listen_unix(path)], SECRET, admit, timeout=20.0, most=1)
    with ExitStack() as stack:
        stack.callback(listener.close)
        member, stranger, another = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
        outcome: list[object] = []
        member.connect(path)
        dialing = threading.Thread(
            target=lambda: outcome.append(handshake.dial(member, SECRET, DIALER, time.monotonic() + 20))
        )
        dialing.start()
        assert proven.wait(20)
        stranger.connect(path)
        another.connect(path)
        assert stranger.recv(100) == b"", "there is room for one alone"
        evicted.set()
        dialing.join(20)
    assert outcome == [(Admission.WELCOME, ACCEPTOR)]


def test_a_dawdler_is_shown_the_door(endpoints: Callable[..., Endpoint]) -> None:
    one = endpoints(handshake_timeout=0.2)
    with connect(one) as stranger:
        stranger.sendall(b"rlinf data plane 1\n")
        assert stranger.recv(100) == b""


def test_strangers_do_not_fill_the_log(endpoints: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture) -> None:
    one = endpoints()
    for _ in range(30):
        with connect(one) as stranger, contextlib.suppress(OSError):
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n".ljust(100))
            while stranger.recv(100):
                pass
    assert 1 <= sum("an unknown peer connected" in record.message for record in caplog.records) <= 5
    one.close()
    assert "25 more warnings of that kind were left out" in caplog.text


def test_two_clusters_do_not_mix(endpoints: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture) -> None:
    secret = ClusterSecret.generate()
    one, two = endpoints(), endpoints(secret)
    here, _ = groups(one, two)
    with caplog.at_level(logging.WARNING), pytest.raises(AuthenticationError):
        here.send(1, WorkerAddress("two", 0))
    assert SECRET.key.hex() not in caplog.text
    assert secret.key.hex() not in caplog.text


def test_a_dial_meant_for_a_predecessor_is_turned_away(endpoints: Callable[..., Endpoint]) -> None:
    one, two = endpoints(), endpoints()
    with connect(two) as sock:
        stale = PeerIdentity(one.info.incarnation, "an earlier one", "c")
        verdict, _ = handshake.dial(sock, SECRET, stale, time.monotonic() + 5)
    assert verdict is Admission.STALE


def test_both_dial_at_once_and_share_one_connection(endpoints: Callable[..., Endpoint]) -> None:
    for _ in range(10):
        one, two = endpoints(), endpoints()
        first, second = groups(one, two)
        barrier = threading.Barrier(2)
        received: list[list[int]] = []

        def talk(
            group: CollectiveGroup,
            peer: WorkerAddress,
            barrier: threading.Barrier = barrier,
            received: list[list[int]] = received,
        ) -> None:
            barrier.wait()
            for number in range(20):
                group.send(number, peer)
            received.append([group.recv(peer) for _ in range(20)])

        threads = [
            threading.Thread(target=talk, args=(first, second.me)),
            threading.Thread(target=talk, args=(second, first.me)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert received == [list(range(20))] * 2
        assert_talking(first, second)
        assert len(one._connections.all()) <= 2
