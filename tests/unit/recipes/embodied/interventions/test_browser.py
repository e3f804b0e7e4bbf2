"""The page's server by its protocol: a token first, one operator, and pictures no faster than they are seen."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.browser import browser_source
from recipes.embodied.interventions.browser.browser_source import BrowserSource
from recipes.embodied.interventions.browser.operator_desk import jpeg
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.registry import open_source
from tests.waiting import until

pytestmark = pytest.mark.security

TOKEN = "0123456789abcdef0123456789abcdef"
HELD = {"enabled": True, "keys": [], "pressed": [], "pad": None}
LET_GO = {**HELD, "enabled": False}


@pytest.fixture
def env() -> VectorEnv:
    arm = make_env("franka_kin", EnvSettings(num_envs=1, task="pick", max_episode_steps=1000))
    arm.reset()
    return arm


@pytest.fixture
def source(env: VectorEnv, tmp_path: Path) -> Iterator[BrowserSource]:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    opened = open_source("browser", env, {"token_file": str(file), "port": 0, "hz": 1000.0, "picture_hz": 60})
    assert isinstance(opened, BrowserSource)
    env.intervention = opened
    yield opened
    opened.close()
    opened.close()


def page(source: BrowserSource, token: str | None = TOKEN, **headers: str) -> ClientConnection:
    """Open a connection as the page does."""
    address = source.url.replace("http", "ws") + "operate"
    origin = headers.pop("origin", source.url.rstrip("/"))
    connection = connect(address, additional_headers={"Origin": origin, **headers}, open_timeout=20).__enter__()
    if token is not None:
        say(connection, {"token": token})
    return connection


def say(connection: ClientConnection, message: dict[str, Any]) -> None:
    connection.send(json.dumps(message))


def answer(connection: ClientConnection) -> Any:
    return json.loads(connection.recv(timeout=20))


def expect_closed(connection: ClientConnection, code: int) -> list[Any]:
    """Check the code by which a connection is closed; return what came before."""
    heard: list[Any] = []
    closed: ConnectionClosed | None = None
    while closed is None:
        try:
            heard.append(connection.recv(timeout=20))
        except ConnectionClosed as error:
            closed = error
    assert closed.rcvd is not None
    assert closed.rcvd.code == code
    return heard


def wait_until(look: Callable[[], Any]) -> Any:
    """Return the first value of `look` that is true."""
    values: list[Any] = []
    until(lambda: values.append(look()) or values[-1], pause=0.0)
    return values[-1]


def step(env: VectorEnv) -> Any:
    return env.step(np.zeros((1, 1, 8), np.float32))


def test_keys_of_the_operator_move_the_arm(source: BrowserSource, env: VectorEnv) -> None:
    assert step(env).interventions.sum() == 0
    operator = page(source)
    assert answer(operator) == {"ok": True, "hz": 1000.0}
    say(operator, {**HELD, "keys": ["r"]})
    moved = wait_until(lambda: (result := step(env)).interventions.any() and result)
    assert np.abs(moved.executed).max() > 0.1
    say(operator, {**LET_GO, "pressed": ["success"]})
    ended = wait_until(lambda: (result := step(env)).terminations.any() and result)
    assert ended.rewards.sum() >= 1
    wait_until(lambda: not step(env).interventions.any())  # the policy acts again
    operator.close()


@pytest.mark.parametrize("token", ["wrong" * 8, TOKEN[:-1], "ü"])
def test_wrong_token_gets_nothing(source: BrowserSource, env: VectorEnv, token: str) -> None:
    thief = page(source, token)
    with contextlib.suppress(ConnectionClosed):  # the refusal may be faster
        say(thief, {**HELD, "keys": ["r"]})
    assert expect_closed(thief, 4401) == []
    assert not any(step(env).interventions.any() for _ in range(5))


def test_second_person_is_refused_politely(source: BrowserSource) -> None:
    first = page(source)
    assert answer(first)["ok"]
    second = page(source)
    refusal = expect_closed(second, 4409)
    assert [json.loads(line) for line in refusal] == [
        {"ok": False, "message": "somebody else is steering; try again when they have left"}
    ]
    first.close()

    def sits() -> bool:
        third = page(source)
        return bool(answer(third)["ok"])

    wait_until(sits)


def test_newest_wins_after_a_dead_link(source: BrowserSource, env: VectorEnv) -> None:
    first = page(source)
    assert answer(first)["ok"]
    say(first, {**HELD, "keys": ["r"]})
    wait_until(lambda: step(env).interventions.any())
    source._desk._heard_at -= browser_source.ALIVE_SECONDS  # nothing has come for so long
    second = page(source)
    assert answer(second)["ok"]
    heard = expect_closed(first, 4408)
    assert json.loads(heard[-1]) == {"ok": False, "message": "somebody else with the token has taken over"}


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"origin": "null"}])
def test_page_elsewhere_opens_no_connection(source: BrowserSource, headers: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as raised:
        page(source, None, **headers)
    assert raised.value.response.status_code == 403


def test_other_name_of_the_address_is_refused(source: BrowserSource) -> None:
    for name, status in (("evil.example", 403), ("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:9", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", source._server.port, timeout=20)
        connection.request("GET", "/", headers={"Host": name})
        reply = connection.getresponse()
        assert reply.status == status, name
        assert "default-src 'none'" in str(reply.getheader("content-security-policy"))
        assert TOKEN.encode() not in reply.read()
        connection.close()


@pytest.mark.parametrize("line", ["[]", "{}", '{"enabled": 1}', '{"shown": "x"}', "[" * 1000, b"\x80\x04"])
def test_what_makes_no_sense_ends_the_connection(source: BrowserSource, line: str | bytes) -> None:
    operator = page(source)
    assert answer(operator)["ok"]
    operator.send(line)
    expect_closed(operator, 4400)
    wait_until(lambda: source._desk.operator is None)


def test_too_long_message_ends_the_connection(source: BrowserSource) -> None:
    operator = page(source)
    operator.send("x" * 5000)
    expect_closed(operator, 1009)


def test_idle_strangers_keep_nobody_out(source: BrowserSource) -> None:
    strangers = [page(source, None) for _ in range(40)]
    operator = page(source)
    assert answer(operator)["ok"]
    for stranger in strangers:
        stranger.close_socket()


def test_picture_comes_with_its_age_and_waits_for_the_last(source: BrowserSource, env: VectorEnv) -> None:
    operator = page(source)
    assert answer(operator)["ok"]
    pictures: list[bytes] = []
    states: list[Any] = []

    def receive() -> None:
        step(env)
        try:
            message = operator.recv(timeout=0.01)
        except TimeoutError:
            return
        if isinstance(message, bytes):
            pictures.append(message)
        else:
            states.append(json.loads(message))

    wait_until(lambda: (receive(), len(pictures) >= 2)[1])
    head = json.loads(pictures[0][4 : 4 + int.from_bytes(pictures[0][:4], "big")])
    assert head["camera"] == "scene"
    assert 0 <= head["age"] < 20
    assert pictures[0].endswith(b"\xff\xd9")
    # Two are on their way: no further one is sent, however many steps are taken.
    ended = source._server.exhibit.newest.number + 3
    wait_until(lambda: (receive(), source._server.exhibit.newest.number >= ended)[1])
    assert len(pictures) == 2
    say(operator, {"shown": head["number"]})
    wait_until(lambda: (receive(), len(pictures) == 3)[1])
    assert len(source.picture_seconds) == 1
    assert states[-1]["state"]["acts"] == "policy"
    operator.close()


def test_nobody_is_drawn_for_when_no_page_is_open(source: BrowserSource, env: VectorEnv) -> None:
    for _ in range(5):
        step(env)
    assert source._server.exhibit.newest.views == ()


def test_large_picture_is_sent_smaller() -> None:
    from io import BytesIO

    from PIL import Image

    image = np.zeros((960, 1280, 3), np.uint8)
    assert Image.open(BytesIO(jpeg(image, 75))).size == (640, 480)


def test_taken_port_is_named(source: BrowserSource, env: VectorEnv) -> None:
    options = {"token_file": source.options.token_file, "port": source._server.port}
    with pytest.raises(InterventionError, match=r"cannot listen on 127\.0\.0\.1") as raised:
        open_source("browser", env, options)
    assert "free port" in str(raised.value.help)
