"""The block of the live view on a terminal that is resized."""

from __future__ import annotations

import io
from collections.abc import Generator

import pytest
from rich.console import Console, Group
from rich.text import Text

from rlinf_cli.live.terminal import ResizableBlock

UP_AND_ERASE = "\x1b[1A\x1b[2K"


class Screen:
    """A terminal of 40 columns with a block of two lines, of 30 and 5 characters."""

    def __init__(self) -> None:
        self.written = io.StringIO()
        self.console = Console(file=self.written, force_terminal=True, width=40, height=20, legacy_windows=False)
        lines = [Text("a" * 30, no_wrap=True, overflow="ellipsis"), Text("short")]
        self.block = ResizableBlock(get_renderable=lambda: Group(*lines), console=self.console, auto_refresh=False)

    def redrawn(self) -> str:
        """Return what a refresh writes."""
        before = len(self.written.getvalue())
        self.block.refresh()
        return self.written.getvalue()[before:]


@pytest.fixture
def screen() -> Generator[Screen]:
    made = Screen()
    with made.block:
        made.block.refresh()
        yield made


def test_block_of_two_lines_erases_one_row_above_its_last(screen: Screen) -> None:
    assert screen.redrawn().count(UP_AND_ERASE) == 1


def test_narrower_terminal_has_wrapped_lines_erased(screen: Screen) -> None:
    screen.console.width = 14
    # The first line takes three rows now.
    assert screen.redrawn().count(UP_AND_ERASE) == 3
    # It was truncated to the new width.
    assert screen.redrawn().count(UP_AND_ERASE) == 1


def test_wider_terminal_has_nothing_more_to_erase(screen: Screen) -> None:
    screen.console.width = 14
    screen.block.refresh()
    screen.console.width = 40
    assert screen.redrawn().count(UP_AND_ERASE) == 1
    assert "a" * 30 in screen.redrawn()
