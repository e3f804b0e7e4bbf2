"""The page of an operator: who steers, what keys mean, what silence does, and the protocol of the server."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from recipes.embodied.config.intervention_types import BrowserOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions import browser_source
from recipes.embodied.interventions.browser_source import BrowserSource
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.operator_desk import (
    BadMessageError,
    DeskTakenError,
    OperatorDesk,
    OperatorLink,
    controls_of,
    jpeg,
    merged,
    read_token,
    shown,
)
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.registry import open_source
from tests.known import known
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
    assert known(closed.rcvd).code == code
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


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_page_elsewhere_opens_no_connection(source: BrowserSource, origin: str) -> None:
    with pytest.raises(InvalidStatus) as raised:
        page(source, None, origin=origin)
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


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *(
            (line, 4400)
            for line in ("[]", "{}", '{"enabled": 1}', '{"shown": "x"}', '{"shown": NaN}', "[" * 1000, b"\x80\x04")
        ),
        ("x" * 5000, 1009),
    ],
    ids=["list", "empty", "number", "text", "nan", "nested", "pickle", "too long"],
)
def test_what_makes_no_sense_ends_the_connection(source: BrowserSource, line: str | bytes, code: int) -> None:
    operator = page(source)
    assert answer(operator)["ok"]
    operator.send(line)
    expect_closed(operator, code)
    wait_until(lambda: source._desk.operator is None)


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
    assert Image.open(BytesIO(jpeg(np.zeros((960, 1280, 3), np.uint8), 75))).size == (640, 480)


def test_taken_port_is_named(source: BrowserSource, env: VectorEnv) -> None:
    options = {"token_file": source.options.token_file, "port": source._server.port}
    with pytest.raises(InterventionError, match=r"cannot listen on 127\.0\.0\.1") as raised:
        open_source("browser", env, options)
    assert "free port" in str(raised.value.help)


FORWARD = Controls((1.0, 0.0, 0.0), engaged=True)


def message(**fields: Any) -> dict[str, Any]:
    return {"enabled": True, "keys": [], "pressed": [], "pad": None, **fields}


class TestDesk:
    def test_second_person_is_refused_while_first_is_heard(self) -> None:
        desk = OperatorDesk(2.0)
        assert desk.sit("first", 0.0) is None
        assert desk.hear("first", FORWARD, 1.5)
        with pytest.raises(DeskTakenError):
            desk.sit("second", 3.4)
        assert desk.operator == "first"
        assert not desk.hear("second", Controls(verdict="failure"), 3.4)
        assert desk.take() == (FORWARD, True)

    def test_newest_replaces_an_operator_who_is_silent_or_has_left(self) -> None:
        desk = OperatorDesk(2.0)
        desk.sit("first", 0.0)
        desk.hear("first", FORWARD, 1.5)
        assert desk.sit("second", 3.5) == "first"
        assert not desk.hear("first", FORWARD, 3.6)
        desk.leave("first")  # its connection ends late
        assert desk.operator == "second"
        desk.leave("second")
        assert desk.sit("third", 3.7) is None
        assert desk.take() == (FORWARD, True)  # the last words of the first count
        assert desk.take() == (None, True)

    def test_buttons_between_two_steps_all_count(self) -> None:
        desk = OperatorDesk(2.0)
        desk.sit("first", 0.0)
        for controls in (
            Controls(toggles_gripper=True),
            Controls(rewards=True),
            Controls(verdict="discard"),
            Controls(verdict="success"),
            FORWARD,
        ):
            desk.hear("first", controls, 0.1)
        assert desk.take()[0] == FORWARD._replace(toggles_gripper=True, rewards=True, verdict="discard")
        assert merged([Controls(toggles_gripper=True)] * 2) == Controls()
        assert merged([]) is None


class TestMessages:
    @pytest.mark.parametrize(
        ("fields", "linear", "angular"),
        [
            ({"keys": ["w", "a", "r"]}, (1, 1, 1), (0, 0, 0)),
            ({"keys": ["s", "d", "f"]}, (-1, -1, -1), (0, 0, 0)),
            ({"keys": ["o", "k", "j"]}, (0, 0, 0), (1, 1, 1)),
            ({"keys": ["w", "s"]}, (0, 0, 0), (0, 0, 0)),
            ({"pad": [0, -0.5, 0, 0, 0, 0, 0]}, (0.5, 0, 0), (0, 0, 0)),
            ({"pad": [0.25, 0, 0, 0, 0, 1, 0]}, (0, -0.25, 1), (0, 0, 0)),
            ({"pad": [0, 0, 1, -1, 0.5, 0, 1]}, (0, 0, -0.5), (1, 1, -1)),
            ({"keys": ["w"], "pad": [0, -0.5, 0, 0, 0, 0, 0]}, (1, 0, 0), (0, 0, 0)),
        ],
    )
    def test_keys_and_gamepad_move_the_hand(self, fields: Any, linear: Any, angular: Any) -> None:
        controls = controls_of(message(**fields))
        assert controls.linear == pytest.approx(linear)
        assert controls.angular == pytest.approx(angular)
        assert controls.engaged

    @pytest.mark.parametrize("enabled", [True, False])
    def test_flags_count_held_or_not_and_nothing_moves_unless_held(self, enabled: bool) -> None:
        for verdict in ("success", "failure", "discard"):
            assert controls_of(message(enabled=enabled, pressed=[verdict])).verdict == verdict
        assert controls_of(message(enabled=enabled, pressed=["reward"])).rewards
        asked = message(enabled=enabled, keys=["w"], pressed=["gripper"], pad=[1, 1, 1, 1, 1, 0, 1])
        assert (controls_of(asked) == Controls()) is not enabled

    @pytest.mark.parametrize(
        "fields",
        [
            *({"enabled": value} for value in (1, None)),
            *({"keys": value} for value in ("w", ["w", "q"], [1], ["w"] * 33)),
            *({"pressed": value} for value in (["launch"], None)),
            *({"pad": value} for value in ([0, 0, 0], [0] * 6 + [1.5], [0] * 6 + [True], "0000000")),
        ],
    )
    def test_message_that_makes_no_sense_is_refused(self, fields: Any) -> None:
        with pytest.raises(BadMessageError):
            controls_of(message(**fields))

    def test_shown_picture_is_a_number(self) -> None:
        assert shown({"shown": 3}) == 3
        assert shown(message()) is None
        for number in (True, "3", None, 1.0):
            with pytest.raises(BadMessageError, match="`shown` is not a number"):
                shown({"shown": number})


class TestLink:
    def link(self) -> OperatorLink:
        return OperatorLink(BrowserOptions(token_file="unused", hold_steps=3, lost_steps=6), "browser 127.0.0.1:1")

    def test_silent_operator_holds_the_arm_then_ends_the_run(self) -> None:
        link = self.link()
        assert link.step(FORWARD, connected=True) == FORWARD
        steps = [link.step(None, connected=True) for _ in range(5)]
        assert [step.linear[0] for step in steps] == [1, 1, 0, 0, 0]
        assert all(step.engaged for step in steps)
        with pytest.raises(InterventionError, match="has been silent for 6 steps") as raised:
            link.step(None, connected=True)
        assert raised.value.where == "browser 127.0.0.1:1"

    def test_arm_is_held_when_the_connection_ends_unless_let_go(self) -> None:
        link = self.link()
        link.step(FORWARD, connected=True)
        assert link.step(None, connected=False) == Controls(engaged=True)
        link = self.link()
        link.step(FORWARD, connected=True)
        link.step(Controls(), connected=True)
        assert {link.step(None, connected=False) for _ in range(20)} == {Controls()}


def test_tokens_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(InterventionError, match="cannot be read"):
        read_token(str(file))
    file.touch(0o644)
    file.write_text("0123456789abcdef0123456789abcdef")
    with pytest.raises(InterventionError, match="other users"):
        read_token(str(file))
    file.chmod(0o600)
    assert read_token(str(file)) == "0123456789abcdef0123456789abcdef"
    file.write_text("short")
    with pytest.raises(InterventionError, match="shorter"):
        read_token(str(file))
