"""A person elsewhere: a token first, the newest who tells it, and an arm that is held where they fall silent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.remote import remote_source
from recipes.embodied.interventions.remote.remote_control import connect
from recipes.embodied.interventions.remote.remote_messages import (
    BadMessageError,
    controls_of,
    decode,
    encode,
    to_message,
)
from recipes.embodied.interventions.remote.remote_source import RemoteSource, read_token
from recipes.embodied.interventions.source_options import RemoteOptions
from tests.clock import Clock
from tests.unit.recipes.embodied.conftest import CountingEnv

pytestmark = pytest.mark.security

TOKEN = "0123456789abcdef0123456789abcdef"
FORWARD = Controls((1.0, 0.0, 0.0))


class Person:
    """A connection to a source."""

    def __init__(self, source: RemoteSource, token: str | None = TOKEN) -> None:
        self.socket = socket.create_connection(source.address, timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if token is not None:
            self.say({"token": token})
        self._lines = self.socket.makefile("rb")

    def say(self, message: dict[str, Any]) -> None:
        self.socket.sendall(encode(message))

    def answer(self) -> dict[str, Any] | None:
        line = self._lines.readline()
        return json.loads(line) if line else None


def until(source: RemoteSource, holds: Callable[[Controls], bool]) -> Controls:
    """Poll until what was sent has arrived."""
    for _ in range(100_000):
        if holds(result := source.poll()):
            return result
    raise AssertionError("nothing arrived")


def until_closed(source: RemoteSource, person: Person) -> bytes:
    """Poll until the source has closed a connection, which moves nothing; return what it said before."""
    person.socket.setblocking(False)
    said = b""
    for _ in range(100_000):
        assert source.poll() == Controls()
        try:
            received = person.socket.recv(4096)
        except BlockingIOError:
            continue
        except ConnectionError:
            return said
        if not received:
            return said
        said += received
    raise AssertionError("the connection is open")


@pytest.fixture
def source(tmp_path: Path) -> Any:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    env = CountingEnv(EnvSettings(num_envs=1))
    result = RemoteSource(env, RemoteOptions(token_file=str(file), port=0, hold_steps=3, lost_steps=100_000))
    yield result
    result.close()


def test_who_has_the_token_takes_over(source: RemoteSource) -> None:
    assert source.poll() == Controls()
    person = Person(source)
    person.say(to_message(FORWARD))
    assert until(source, lambda value: value.linear[0] == 1) == FORWARD
    assert person.answer() == {"ok": True, "hz": 20.0}
    for entry in (Controls(toggles_gripper=True), Controls(verdict="failure"), Controls()):
        person.say(to_message(entry))
    # Buttons count although another message came after them.
    seen = [until(source, lambda actual: actual.linear[0] == 0)]
    seen += [source.poll() for _ in range(1000)]
    assert sum(item.toggles_gripper for item in seen) == 1
    assert sum(item.verdict == "failure" for item in seen) == 1


def test_without_the_token_nothing_is_heard(source: RemoteSource) -> None:
    for token in ("wrong" * 8, TOKEN[:-1], "ü"):
        thief = Person(source, token)
        thief.say(to_message(FORWARD))
        said = until_closed(source, thief)
        assert b'"ok":true' not in said
    silent = Person(source, None)  # does not keep others out
    person = Person(source)
    person.say(to_message(FORWARD))
    assert until(source, lambda value: value.linear[0] == 1) == FORWARD
    silent.socket.close()


def test_newest_who_tells_the_token_is_the_person(source: RemoteSource) -> None:
    first = Person(source)  # its link may be dead without a word
    first.say(to_message(FORWARD))
    until(source, lambda value: value == FORWARD)
    second = Person(source)
    second.say(to_message(Controls((-1.0, 0.0, 0.0))))
    until(source, lambda item: item.linear[0] == -1)
    assert first.answer() == {"ok": True, "hz": 20.0}
    output = first.answer()
    assert output == {"ok": False, "message": "another client with the token has taken over"}
    assert second.answer() == {"ok": True, "hz": 20.0}


def test_stranger_between_connect_and_token_costs_nobody(source: RemoteSource) -> None:
    person = Person(source, None)
    source.poll()
    strangers = [Person(source, None) for _ in range(3)]
    Person(source, "wrong" * 8)
    for _ in range(100):
        source.poll()
    person.say({"token": TOKEN})
    person.say(to_message(FORWARD))
    assert until(source, lambda item: item.linear[0] == 1) == FORWARD
    assert person.answer() == {"ok": True, "hz": 20.0}
    for stranger in strangers:
        stranger.socket.close()
    person.say(to_message(Controls((0.0, 1.0, 0.0))))
    until(source, lambda value: value.linear[1] == 1)


@pytest.mark.parametrize(
    "words",
    [
        rb'{"token": "\ud800"}',
        rb'{"token": 1, "token": 2}',
        b'{"token": null}',
        b'{"token": ["x"]}',
        b'{"token": ' + b"9" * 900 + b"}",
        b'{"token": NaN}',
        b'"' + b"x" * 900 + b'"',
        b"\xff\xfe\x00",
        b"[" * 1000,
        b'{"a":' * 200,
        b"x" * 5000,
        b"\x00" * 100,
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_nothing_of_a_stranger_raises(source: RemoteSource, words: bytes) -> None:
    person = Person(source)
    until(source, lambda value: source._person is not None)
    stranger = Person(source, None)
    stranger.socket.sendall(words + b"\n")
    until_closed(source, stranger)
    person.say(to_message(FORWARD))
    assert until(source, lambda item: item.linear[0] == 1) == FORWARD


def test_crowd_of_silent_strangers_keeps_nobody_out(source: RemoteSource, caplog: pytest.LogCaptureFixture) -> None:
    crowd = [Person(source, None) for _ in range(100)]
    for _ in range(20):
        source.poll()
    assert len(source._unproven.waiting()) <= 16
    person = Person(source)
    person.say(to_message(FORWARD))
    assert until(source, lambda value: value.linear[0] == 1) == FORWARD
    for member in crowd:
        member.socket.close()


def test_silent_stranger_is_closed(source: RemoteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(remote_source, "time", clock)
    stranger = Person(source, None)
    while not source._unproven.waiting():
        source.poll()
    clock.now += 10
    assert b"no token came" in until_closed(source, stranger)


def test_strangers_do_not_fill_the_log(source: RemoteSource, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        until_closed(source, Person(source, "wrong" * 8))
    assert sum("a wrong token" in record.message for record in caplog.records) == 5


def test_arm_is_held_when_its_person_falls_silent(source: RemoteSource) -> None:
    person = Person(source)
    person.say(to_message(FORWARD))
    until(source, lambda value: value == FORWARD)
    still = [source.poll() for _ in range(5)]
    assert [item.linear[0] for item in still] == [1, 1, 0, 0, 0]
    assert all(item.engaged for item in still)
    person.socket.close()
    assert source.poll().engaged
    again = Person(source)
    again.say(to_message(Controls()))
    until(source, lambda actual: not actual.engaged)  # the policy acts again
    again.say(to_message(FORWARD))
    until(source, lambda actual: actual == FORWARD)
    object.__setattr__(source.options, "lost_steps", 10)
    for _ in range(9):
        source.poll()
    with pytest.raises(InterventionError, match="has been silent for 10 steps"):
        source.poll()


def test_the_last_words_of_a_connection_count(source: RemoteSource) -> None:
    person = Person(source)
    person.say(to_message(FORWARD))
    until(source, lambda value: value == FORWARD)
    person.say(to_message(Controls()))
    person.socket.close()
    assert until(source, lambda item: item.linear[0] == 0) == Controls()


@pytest.mark.parametrize(
    "line",
    [
        b"\x80\x04",
        b"[]",
        b'{"linear": [NaN, 0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [2, 0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [' + b"9" * 400 + b', 0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [true, 0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [0, 0, 0], "angular": [0, 0, 0], "engaged": 1}',
        b'{"linear": [0, 0, 0], "angular": [0, 0, 0], "verdict": "maybe"}',
        b"[" * 1000,
    ],
)
def test_what_makes_no_sense_ends_the_connection(source: RemoteSource, line: bytes) -> None:
    with pytest.raises(BadMessageError):
        controls_of(decode(line))
    person = Person(source)
    person.socket.sendall(line + b"\n")
    until_closed(source, person)


def test_an_endless_line_ends_the_connection(source: RemoteSource) -> None:
    person = Person(source)
    person.socket.sendall(b"x" * 5000)
    assert b'"ok":false' not in until_closed(source, person)
    # Nothing of it is left over for the next one.
    following = Person(source)
    following.say(to_message(FORWARD))
    assert until(source, lambda value: value.linear[0] == 1) == FORWARD


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(InterventionError, match="cannot be read"):
        read_token(str(file))
    file.touch(0o644)
    file.write_text(TOKEN)
    with pytest.raises(InterventionError, match="other users"):
        read_token(str(file))
    file.chmod(0o600)
    assert read_token(str(file)) == TOKEN
    file.write_text("short")
    with pytest.raises(InterventionError, match="shorter"):
        read_token(str(file))


@pytest.mark.parametrize(
    "words",
    [b"[]", b"[" * 900, b'{"ok": true, "hz": "x"}', b'{"ok": true, "hz": null}', b'{"hz": NaN}', b"\xff", b"SSH-2.0-x"],
)
def test_anything_else_that_listens_is_told(words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(words + b"\n"), daemon=True)
        answering.start()
        with pytest.raises(InterventionError, match="the run does not respond"):
            connect(*other.getsockname()[:2], TOKEN)


def test_refusal_is_shown_escaped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = encode({"ok": False, "message": "\x1b[2Jno"})
        threading.Thread(target=lambda: other.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(InterventionError, match="rejects") as caught:
            connect(*other.getsockname()[:2], TOKEN)
    assert caught.value.why == r"\x1b[2Jno"
