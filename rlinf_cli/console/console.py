"""Output to the streams: results to standard output, everything else to standard error.

Text is never hard-wrapped in a pipe, and coloured only on a terminal that supports it. A reader that closes early
(`rlinf ... | head -1`) causes no error and no other exit code.

While a command runs, both streams escape control sequences, whether written by this module, a library, or Ray with the
lines of workers. No markup is interpreted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

from rlinf_cli.console.terminal_stream import guarded_stream, unguarded_stream
from rlinf_core.foreign.terminal_text import escaped
from rlinf_core.process.known_secrets import hidden
from rlinf_core.suggest import clipped

# Write errors that are not a bug: a full disk, a quota, a file-size limit, a broken device.
OUTPUT_LOST: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
# Wide enough that no table is ever wrapped in a pipe.
_UNBOUNDED = 10_000
_NARROWEST = 40

# Control characters that JSON does not escape, and a terminal acts on.
_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "yellow": "1;33", "green": "1;32", "cyan": "1;36"}


class Verbosity:
    """The amount and the format of output, by `--quiet`, `--verbose` and `--json`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the options of an earlier command."""
        self.quiet = False
        self.verbose = False
        self.json = False


verbosity = Verbosity()


@contextmanager
def escaping() -> Generator[None, None, None]:
    """Have both streams escape control characters while the block runs, and standard error mask secrets.

    Results, which programs read, are masked at their source.
    """
    before = sys.stdout, sys.stderr
    out, err = (unguarded_stream(stream) for stream in before)
    sys.stdout = guarded_stream(out, colored(out))
    sys.stderr = guarded_stream(err, colored(err), hidden)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def result(text: str) -> None:
    """Print a result to standard output."""
    _write(sys.stdout, text)


def results(texts: Iterable[str], *, gap: bool = False) -> None:
    """Print one result after another, with an empty line between them if there is to be a gap."""
    for index, text in enumerate(texts):
        result(f"\n{text}" if gap and index else text)


def result_json(data: Any) -> None:
    """Print a result as JSON."""
    result(json_text(data))


def json_text(data: Any) -> str:
    """Return JSON that no terminal acts on."""
    import json

    return json.dumps(data, indent=2, ensure_ascii=False).translate(_ESCAPED)


def message(text: str) -> None:
    """Print a message to standard error; `--quiet` drops it."""
    if not verbosity.quiet:
        _write(sys.stderr, text)


def warn(text: str) -> None:
    """Print a warning; `--quiet` drops it."""
    message(warning(text))


def warning(text: str) -> str:
    """Return a warning as it is printed."""
    return f"{style('warning', 'yellow', sys.stderr)}: {clipped(text)}"


def error(text: str) -> None:
    """Print why the command fails; it is never dropped."""
    _write(sys.stderr, text)


def error_block(what: str, *, where: str | None = None, why: str | None = None, do: str | None = None) -> None:
    """Print an error: message, location, cause, remedy."""
    lines = [f"{style('error', 'red', sys.stderr)}: {clipped(what)}"]
    for label, text in (("where", where), ("why", why), ("do", do)):
        if text:
            first, *rest = clipped(text).splitlines()
            lines.append(f"  {style(label.rjust(5), 'dim', sys.stderr)}: {first}")
            lines.extend(f"         {line}" for line in rest)
    error("\n".join(lines))


def colored(stream: TextIO | None = None) -> bool:
    """Return True if `stream` (standard output by default) is a terminal that supports colours."""
    terminal = (sys.stdout if stream is None else stream).isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, name: str, stream: TextIO | None = None) -> str:
    """Return `text` in a style, if the stream supports it."""
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if colored(stream) else text


def width(stream: TextIO | None = None) -> int:
    """Return the width of the terminal in columns, or a practically unlimited one elsewhere."""
    if not (sys.stdout if stream is None else stream).isatty():
        return _UNBOUNDED
    from shutil import get_terminal_size

    return max(_NARROWEST, get_terminal_size().columns)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), keep: Sequence[int] = (0,)
) -> str:
    """Return a table without borders. On a terminal that is too narrow its cells are folded, elsewhere never.

    Args:
        right: indices of the columns that are aligned to the right.
        keep: indices of the columns that are not folded, unless they alone take half of the width.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = width()
    rows = [tuple(escaped(clipped(cell)) for cell in row) for row in rows]
    widest = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(headers))
    for index, header in enumerate(headers):
        grid.add_column(
            header,
            justify="right" if index in right else "left",
            no_wrap=columns == _UNBOUNDED or (index in keep and widest[index] <= columns // 2),
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    plain = not colored()
    console = Console(
        width=columns,
        color_system=None if plain else "standard",
        force_terminal=not plain,
        no_color=plain,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except BrokenPipeError:
        _to_nowhere(stream)
    except OSError as error:
        # Messages are not a reason to end what they are about, as a run whose output goes to a full disk.
        if stream is not sys.stderr or error.errno not in OUTPUT_LOST:
            raise


def _to_nowhere(stream: TextIO) -> None:
    """Discard further output to a closed pipe, including the interpreter's final flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def close() -> None:
    """Flush both streams. A closed pipe is not an error, and a full disk has been reported."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _to_nowhere(stream)
