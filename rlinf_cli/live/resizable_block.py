"""A block of lines at the end of a terminal that stays whole when the terminal is resized."""

from __future__ import annotations

from rich.console import ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text


class ResizableBlock(Live):
    """A block that is redrawn in place, and erases itself also where the terminal has wrapped its lines anew.

    A terminal that is made narrower wraps the lines it shows, so that the block takes more rows than it has lines.
    `Live` erases as many rows as it drew, and the others would stay. A terminal that cuts lines instead, as xterm
    does, loses as many lines above the block.
    """

    # Cells of each line as drawn, and as it will be drawn next.
    _drawn: tuple[int, ...] = ()
    _following: tuple[int, ...] = ()

    def get_renderable(self) -> Group:
        """Return the lines of the block as they are now."""
        block = super().get_renderable()
        assert isinstance(block, Group)
        self._following = tuple(line.cell_len if isinstance(line, Text) else 0 for line in block.renderables)
        return block

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what erases the block, what is printed above it, and the block."""
        width = self.console.width
        wrapped = sum((cells - 1) // width for cells in self._drawn if cells)
        erase = Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * wrapped)
        self._drawn = tuple(min(cells, width) for cells in self._following)
        return super().process_renderables([erase, *renderables] if wrapped else renderables)
