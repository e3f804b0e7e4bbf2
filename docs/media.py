"""Record a run of `rlinf train` in a terminal and draw it as an animated picture: `make media`.

The picture is docs/media/train.svg. A browser shows it without a script, and one that is asked for less motion shows
its last frame.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

PICTURE: Final = Path(__file__).parent / "media" / "train.svg"
COLUMNS, ROWS = 96, 20
FRAMES, HELD_FRAMES, FRAMES_PER_SECOND = 45, 15, 3
_CELL, _LINE, _MARGIN = 8.4, 19, 16
# Pictures join plain spaces.
_SPACE = "\N{NO-BREAK SPACE}"
_COLOURS = {
    "": "#d6dbe5",
    "dim": "#8b95a7",
    "30": "#5b6478",
    "31": "#f27878",
    "32": "#7ddc8b",
    "33": "#f0c674",
    "36": "#62c8dc",
    "90": "#5b6478",
}
_SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

Recording = list[tuple[float, str]]


class Style(NamedTuple):
    """Colour and weight of a cell."""

    colour: str = ""
    bold: bool = False


class Terminal:
    """A terminal that knows the control sequences `rlinf` writes: colours, and lines drawn again."""

    def __init__(self) -> None:
        self._lines: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()

    def feed(self, text: str) -> None:
        """Write `text` where the cursor is."""
        for match in _SEQUENCE.finditer(text):
            numbers, letter, control, plain = match.groups()
            if plain:
                self._write(plain)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row, self._column = self._row + 1, 0
                self._lines += [[] for _ in range(self._row + 1 - len(self._lines))]
            elif letter == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif letter == "K":
                self._lines[self._row] = []
            elif letter == "m":
                self._style = _styled(self._style, numbers)

    def _write(self, text: str) -> None:
        line = self._lines[self._row]
        line += [(" ", Style())] * (self._column - len(line))
        line[self._column : self._column + len(text)] = [(character, self._style) for character in text]
        self._column += len(text)

    def rows(self, count: int) -> list[list[tuple[str, Style]]]:
        """Return the last `count` rows, each a list of runs of one style."""
        lines = self._lines[: -1 if not self._lines[-1] else None]
        return [_runs(line[:COLUMNS]) for line in lines[-count:]]


def _styled(style: Style, numbers: str) -> Style:
    for number in numbers.split(";"):
        if number in ("", "0"):
            style = Style()
        elif number == "1":
            style = style._replace(bold=True)
        elif number == "2":
            style = style._replace(colour="dim")
        elif number in _COLOURS:
            style = style._replace(colour=number)
    return style


def _runs(line: list[tuple[str, Style]]) -> list[tuple[str, Style]]:
    runs: list[tuple[str, Style]] = []
    for character, style in line:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + character, style)
        else:
            runs.append((character, style))
    return runs


def record(command: list[str]) -> Recording:
    """Run `command` in its own terminal, and return what it wrote with the seconds since its start.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS + 4, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS + 4)}
    began, recording = time.monotonic(), Recording()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        with open(ours, "rb", buffering=0) as stream:
            while part := _part(stream.fileno()):
                recording.append((time.monotonic() - began, part.decode("utf-8", "replace")))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, "".join(text for _, text in recording))
    return recording


def _part(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux ends a terminal whose last writer has gone so.
        return b""


def drawn(prompt: str, recording: Recording) -> str:
    """Return a recording as an animated picture: its whole length at equal distances, and its end for some seconds."""
    terminal, frames = Terminal(), list[str]()
    terminal.feed(f"\x1b[36m$\x1b[0m {prompt}\r\n")
    rest = list(reversed(recording))
    for index in range(FRAMES):
        moment = recording[-1][0] * index / (FRAMES - 1)
        while rest and rest[-1][0] <= moment:
            terminal.feed(rest.pop()[1])
        frames.append(_frame(terminal.rows(ROWS), index))
    return _picture(frames, prompt)


def _frame(rows: list[list[tuple[str, Style]]], index: int) -> str:
    """Return one frame, as many of its own widths to the right as frames come before it."""
    parts: list[str] = []
    for row, runs in enumerate(rows):
        column = 0
        for text, style in runs:
            if text.strip():
                start = column + len(text) - len(text.lstrip())
                word = text.strip().replace(" ", _SPACE)
                look = f' fill="{_COLOURS[style.colour]}"' if style.colour else ""
                look += ' font-weight="700"' if style.bold else ""
                parts.append(
                    f'<text x="{start * _CELL:.1f}" y="{(row + 1) * _LINE}"'
                    f' textLength="{len(word) * _CELL:.1f}"{look}>{escape(word, quote=False)}</text>'
                )
            column += len(text)
    return f'<g transform="translate({index * _width():.1f})">{"".join(parts)}</g>'


def _width() -> float:
    return COLUMNS * _CELL + 2 * _MARGIN


def _picture(frames: list[str], prompt: str) -> str:
    height = ROWS * _LINE + 2 * _MARGIN
    shown = len(frames) + HELD_FRAMES
    last = -(len(frames) - 1) * _width()
    moved = 100 * (len(frames) - 1) / shown
    joined = "\n".join(frames)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_width():.0f} {height}" role="img"'
        f' aria-label="{escape(prompt)}: a terminal while it trains">\n'
        f"<style>#run {{ font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace;"
        f" fill: {_COLOURS['']}; transform: translateX({last:.1f}px);"
        f" animation: run {shown / FRAMES_PER_SECOND:.0f}s infinite }}\n"
        f"@keyframes run {{ 0% {{ transform: none; animation-timing-function: steps({len(frames) - 1}, jump-end) }}\n"
        f"{moved:.3f}%, 100% {{ transform: translateX({last:.1f}px) }} }}\n"
        "@media (prefers-reduced-motion: reduce) { #run { animation: none } }</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#151a23"/>\n'
        f'<svg x="{_MARGIN}" y="{_MARGIN - 4}" width="{COLUMNS * _CELL:.1f}" height="{height - _MARGIN}">'
        f'<g id="run">\n{joined}\n</g></svg>\n</svg>\n'
    )


def main() -> int:
    """Record the default run of the embodied recipe, and write its picture."""
    rlinf = Path(sys.executable).with_name("rlinf")
    prompt = "rlinf train recipe=embodied"
    picture = drawn(prompt, record([str(rlinf), *prompt.split()[1:]]))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"{PICTURE}: {len(picture.encode()) / 1024:.0f} KiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
