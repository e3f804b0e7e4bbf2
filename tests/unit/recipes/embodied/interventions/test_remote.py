"""A person elsewhere: a token first, one at a time, and an arm that is held where they fall silent."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.remote.remote_messages import (
    BadMessageError,
    controls_of,
    decode,
    encode,
    message_of,
)
from recipes.embodied.interventions.remote.remote_source import RemoteSource, read_token
from recipes.embodied.interventions.source_options import RemoteOptions
from tests.unit.recipes.embodied.conftest import CountingEnv

TOKEN = "0123456789abcdef0123456789abcdef"
FORWARD = Controls((1.0, 0.0, 0.0))


class Person:
    """A connection to a source."""

    def __init__(self, source: RemoteSource, token: str | None = TOKEN) -> None:
        self.socket = socket.create_connection(source.address, timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if token is not None:
            self.say({"token": token})

    def say(self, message: dict[str, Any]) -> None:
        self.socket.sendall(encode(message))

    def answer(self) -> dict[str, Any] | None:
        line = self.socket.makefile("rb").readline()
        return json.loads(line) if line else None


def until(source: RemoteSource, holds: Callable[[Controls], bool]) -> Controls:
    """Poll until what was sent has arrived."""
    for _ in range(100_000):
        if holds(found := source.poll()):
            return found
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
    found = RemoteSource(env, RemoteOptions(token_file=str(file), port=0, hold_steps=3, lost_steps=100_000))
    yield found
    found.close()


def test_who_has_the_token_takes_over(source: RemoteSource) -> None:
    assert source.poll() == Controls()
    person = Person(source)
    person.say(message_of(FORWARD))
    assert until(source, lambda found: found.linear[0] == 1) == FORWARD
    assert person.answer() == {"ok": True, "hz": 20.0}
    for each in (Controls(toggles_gripper=True), Controls(verdict="failure"), Controls()):
        person.say(message_of(each))
    # Buttons count although another message came after them.
    seen = [until(source, lambda found: found.linear[0] == 0)]
    seen += [source.poll() for _ in range(1000)]
    assert sum(each.toggles_gripper for each in seen) == 1
    assert sum(each.verdict == "failure" for each in seen) == 1


def test_without_the_token_nothing_is_heard(source: RemoteSource) -> None:
    for token in ("wrong" * 8, TOKEN[:-1], "ü"):
        thief = Person(source, token)
        thief.say(message_of(FORWARD))
        said = until_closed(source, thief)
        assert b'"ok":true' not in said
    silent = Person(source, None)  # does not keep others out
    person = Person(source)
    person.say(message_of(FORWARD))
    assert until(source, lambda found: found.linear[0] == 1) == FORWARD
    silent.socket.close()
    second = Person(source)
    second.say(message_of(Controls((-1.0, 0.0, 0.0))))
    person.say(message_of(FORWARD))
    assert until(source, lambda found: found.linear[0] == 1) == FORWARD


def test_the_arm_is_held_where_the_person_falls_silent_and_the_run_ends_some_time(source: RemoteSource) -> None:
    person = Person(source)
    person.say(message_of(FORWARD))
    until(source, lambda found: found == FORWARD)
    still = [source.poll() for _ in range(5)]
    assert [each.linear[0] for each in still] == [1, 1, 0, 0, 0]
    assert all(each.engaged for each in still)
    person.socket.close()
    assert source.poll().engaged
    again = Person(source)
    again.say(message_of(Controls()))
    until(source, lambda found: not found.engaged)  # the policy acts again
    again.say(message_of(FORWARD))
    until(source, lambda found: found == FORWARD)
    object.__setattr__(source.options, "lost_steps", 10)
    for _ in range(9):
        source.poll()
    with pytest.raises(InterventionError, match="has said nothing for 10 steps"):
        source.poll()


def test_the_last_words_of_a_connection_count(source: RemoteSource) -> None:
    person = Person(source)
    person.say(message_of(FORWARD))
    until(source, lambda found: found == FORWARD)
    person.say(message_of(Controls()))
    person.socket.close()
    assert until(source, lambda found: found.linear[0] == 0) == Controls()


@pytest.mark.parametrize(
    "line",
    [
        b"\x80\x04",
        b"[]",
        b'{"linear": [NaN, 0, 0], "angular": [0, 0, 0]}',
        b'{"linear": [2, 0, 0], "angular": [0, 0, 0]}',
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
    following.say(message_of(FORWARD))
    assert until(source, lambda found: found.linear[0] == 1) == FORWARD


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(InterventionError, match="cannot be read"):
        read_token(str(file))
    file.touch(0o644)
    file.write_text(TOKEN)
    with pytest.raises(InterventionError, match="others than its owner"):
        read_token(str(file))
    file.chmod(0o600)
    assert read_token(str(file)) == TOKEN
    file.write_text("short")
    with pytest.raises(InterventionError, match="shorter"):
        read_token(str(file))
