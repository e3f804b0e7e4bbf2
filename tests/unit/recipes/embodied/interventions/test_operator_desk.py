"""Who steers from a page, what their keys mean, and what becomes of an arm when they fall silent. No sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.interventions.browser.operator_desk import (
    DeskTakenError,
    OperatorDesk,
    OperatorLink,
    merged,
    read_token,
)
from recipes.embodied.interventions.browser.page_messages import BadMessageError, controls_of, decode, packed, shown
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.source_options import BrowserOptions

pytestmark = pytest.mark.security

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

    def test_newest_replaces_an_operator_who_is_silent(self) -> None:
        desk = OperatorDesk(2.0)
        desk.sit("first", 0.0)
        desk.hear("first", FORWARD, 1.5)
        assert desk.sit("second", 3.5) == "first"
        assert not desk.hear("first", FORWARD, 3.6)
        desk.leave("first")  # its connection ends late
        assert desk.operator == "second"

    def test_place_is_free_when_the_operator_has_left(self) -> None:
        desk = OperatorDesk(2.0)
        desk.sit("first", 0.0)
        desk.hear("first", FORWARD, 0.1)
        desk.leave("first")
        assert desk.sit("second", 0.2) is None
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

    def test_nothing_moves_unless_the_person_holds(self) -> None:
        asked = message(enabled=False, keys=["w"], pressed=["gripper"], pad=[1, 1, 1, 1, 1, 0, 1])
        assert controls_of(asked) == Controls()

    @pytest.mark.parametrize("enabled", [True, False])
    def test_flags_count_held_or_not(self, enabled: bool) -> None:
        for verdict in ("success", "failure", "discard"):
            assert controls_of(message(enabled=enabled, pressed=[verdict])).verdict == verdict
        assert controls_of(message(enabled=enabled, pressed=["reward"])).rewards

    @pytest.mark.parametrize(
        "fields",
        [
            {"enabled": 1},
            {"enabled": None},
            {"keys": "w"},
            {"keys": ["w", "q"]},
            {"keys": [1]},
            {"keys": ["w"] * 33},
            {"pressed": ["launch"]},
            {"pressed": None},
            {"pad": [0, 0, 0]},
            {"pad": [0, 0, 0, 0, 0, 0, 1.5]},
            {"pad": [0, 0, 0, 0, 0, 0, True]},
            {"pad": "0000000"},
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

    def test_picture_has_a_head_of_known_length(self) -> None:
        sent = packed("front", 7, 0.25, b"JPEG")
        size = int.from_bytes(sent[:4], "big")
        assert sent[4 : 4 + size] == b'{"camera": "front", "number": 7, "age": 0.25}'
        assert sent[4 + size :] == b"JPEG"


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

    def test_arm_is_held_at_once_when_the_connection_ends(self) -> None:
        link = self.link()
        link.step(FORWARD, connected=True)
        assert link.step(None, connected=False) == Controls(engaged=True)

    def test_operator_who_let_go_may_leave(self) -> None:
        link = self.link()
        link.step(FORWARD, connected=True)
        link.step(Controls(), connected=True)
        assert {link.step(None, connected=False) for _ in range(20)} == {Controls()}


@pytest.mark.parametrize("text", [b"\x80\x04", b"[]", b"[" * 200, b'{"token": NaN}'])
def test_a_text_that_is_no_object_is_no_message(text: bytes) -> None:
    with pytest.raises(BadMessageError):
        decode(text)


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
