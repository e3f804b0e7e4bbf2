"""The animated picture of a run: what the terminal showed, and small enough for a page."""

from __future__ import annotations

import sys
from subprocess import CalledProcessError
from xml.etree import ElementTree

import pytest
from PIL import Image

from docs.arm import compose
from docs.media import PICTURE, Terminal, drawn, record

SVG = "{http://www.w3.org/2000/svg}"


def shown(text: str) -> list[str]:
    terminal = Terminal()
    terminal.feed(text)
    return ["".join(part for part, _ in row) for row in terminal.rows(9)]


def test_terminal_draws_lines_again() -> None:
    assert shown("kept\r\nstep 1\r\nnow a\r\x1b[2K\x1b[1A\x1b[2Kstep 2\r\nnow b") == ["kept", "step 2", "now b"]


def test_terminal_keeps_styles() -> None:
    terminal = Terminal()
    terminal.feed("\x1b[1mbold\x1b[0m plain \x1b[32mgreen")
    assert [(text, style.bold, style.colour) for text, style in terminal.rows(1)[0]] == [
        ("bold", True, ""),
        (" plain ", False, ""),
        ("green", False, "32"),
    ]


def test_picture_shows_first_and_last_frame() -> None:
    picture = ElementTree.fromstring(drawn("rlinf", [(0.0, "a < b\r\n"), (1.0, "finished\r\n")]))
    frames = list(picture.iterfind(f".//{SVG}g[@id='run']/{SVG}g"))
    texts = [[text.text for text in frame.iter(f"{SVG}text")] for frame in (frames[0], frames[-1])]
    assert texts == [["$", "rlinf", "a\N{NO-BREAK SPACE}<\N{NO-BREAK SPACE}b"], [*texts[0], "finished"]]


def test_recording_of_a_failed_command_is_refused() -> None:
    with pytest.raises(CalledProcessError):
        record([sys.executable, "-c", "raise SystemExit(3)"])


def test_committed_picture_is_small_and_ends_well() -> None:
    assert PICTURE.stat().st_size <= 500 * 1024
    assert "finished" in list(ElementTree.parse(PICTURE).iterfind(f".//{SVG}g[@id='run']/{SVG}g"))[-1].itertext()


def test_arm_is_shown_from_its_first_to_its_last_frame_beside_the_right_half_of_the_curve() -> None:
    frames = [Image.new("RGB", (528, 136), (level, level, level)) for level in range(101)]
    curve = Image.new("RGB", (400, 132), "white")
    curve.paste((255, 0, 0), (200, 0, 400, 132))
    picture = compose(frames, curve)
    shown = [picture.getpixel(place) for place in ((10, 10), (274, 10), (10, 146), (274, 146))]
    assert shown == [(level,) * 3 for level in (0, 30, 60, 95)]
    assert picture.getpixel((530, 130)) == (255, 0, 0)
