"""Output to the streams and to files that the user named: results to standard output, all else to standard error.

Text is never wrapped in a pipe, and colored only on a terminal that supports it. A reader that closes early
(`rlinf ... | head -1`) causes no error and does not change the exit code.

While a command runs, both streams escape control sequences, whether this module, a library, or Ray with the lines of
workers writes them. No markup is interpreted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, TextIO, cast

from rlinf_core.errors import RLinfError
from rlinf_core.process.known_secrets import hidden
from rlinf_core.suggest import clipped, escaped

_COLOUR: Final = (
    r"(?:0|[1-4]|7|2[1-47-9]|3[0-79]|4[0-79]|9[0-7]|10[0-7]|[34]8;5;\d{1,3}|[34]8;2;\d{1,3};\d{1,3};\d{1,3})"
)
_RESETS: Final = frozenset(("\x1b[0m", "\x1b[m"))


@cache
def _colours() -> re.Pattern[str]:
    """Return the pattern of sequences that set colors or weights, but do not conceal or blink."""
    return re.compile(rf"\x1b\[(?:{_COLOUR}(?:;{_COLOUR})*)?m")


def in_colours(text: str, colours: bool) -> str:
    """Return a text with control characters escaped, except for sequences that set colors, which are kept or dropped.

    Args:
        text: any text.
        colours: whether to keep the colors, which are then reset at the end of the text.
    """
    if "\x1b" not in text:
        return escaped(text)
    parts = list[str]()
    end, last = 0, ""
    for match in _colours().finditer(text):
        parts.append(escaped(text[end : match.start()]))
        if colours:
            last = match[0]
            parts.append(last)
        end = match.end()
    parts.append(escaped(text[end:]))
    whole = "".join(parts)
    if not last or last in _RESETS:
        return whole
    body = whole.rstrip("\n")
    return f"{body}\x1b[0m{whole[len(body) :]}"


class TerminalStream:
    """A wrapper of a text stream that escapes control sequences in written text; else it behaves like the stream.

    Args:
        stream: the stream to write to.
        colours: whether the stream shows colors.
        mask: a function that removes secrets from a text.
    """

    def __init__(self, stream: TextIO, colours: bool, mask: Callable[[str], str]) -> None:
        self.stream = stream
        self._colours = colours
        self._mask = mask

    def write(self, text: str) -> int:
        """Write a text; return its length. A leading carriage return is kept, as progress bars need it."""
        start = "\r" if text.startswith("\r") and not text.startswith("\r\n") else ""
        self.stream.write(start + in_colours(self._mask(text[len(start) :]), self._colours))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)


def guarded_stream(stream: TextIO, colours: bool, mask: Callable[[str], str] = str) -> TextIO:
    """Return a stream wrapped in `TerminalStream`."""
    return cast("TextIO", TerminalStream(stream, colours, mask))


def unguarded_stream(stream: TextIO) -> TextIO:
    """Return the wrapped stream, for a view that moves the cursor and escapes its texts itself."""
    while isinstance(stream, TerminalStream):
        stream = stream.stream
    return stream


# Write errors with an external cause: a full disk, a quota, a file-size limit, a broken device.
OUTPUT_LOST: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
# Wide enough that no table is ever wrapped in a pipe.
_UNBOUNDED = 10_000
_NARROWEST = 40

# Control characters that affect a terminal and that JSON does not escape.
_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "yellow": "1;33", "green": "1;32", "cyan": "1;36"}


class Verbosity:
    """The amount and the format of output, by `--quiet`, `--verbose` and `--json`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the options of an earlier command."""
        self.quiet = False
        self.verbose = False
        self.json = False


verbosity = Verbosity()


@contextmanager
def escaping() -> Generator[None, None, None]:
    """Make both streams escape control characters within the block, and standard error mask secrets.

    Results on standard output, which programs read, are masked at their source.
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


def results(texts: Iterable[str]) -> None:
    """Print one result after another."""
    for text in texts:
        result(text)


def result_json(data: Any) -> None:
    """Print a result as JSON."""
    result(json_text(data))


def json_text(data: Any) -> str:
    """Return data as JSON without raw control characters; a number that is not finite, which JSON lacks, is null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False).translate(_ESCAPED)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in cast("Mapping[Any, Any]", data).items()}
    return [_finite(value) for value in cast("list[Any]", data)] if isinstance(data, list | tuple) else data


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
    """Return whether `stream` (standard output by default) is a terminal that supports colors."""
    terminal = (sys.stdout if stream is None else stream).isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, name: str, stream: TextIO | None = None) -> str:
    """Return `text` in a style, if the stream supports it."""
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if colored(stream) else text


def width(stream: TextIO | None = None) -> int:
    """Return the width of the terminal in columns, or a practically unlimited width without a terminal."""
    if not (sys.stdout if stream is None else stream).isatty():
        return _UNBOUNDED
    from shutil import get_terminal_size

    return max(_NARROWEST, get_terminal_size().columns)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), keep: Sequence[int] = (0,)
) -> str:
    """Return a table without borders. Its cells are folded only if a terminal is too narrow.

    Args:
        headers: the headers of the columns.
        rows: the cells of each row.
        right: indices of the right-aligned columns.
        keep: indices of the columns that are not folded unless wider than half of the terminal.
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
        # A lost message must not end the command, such as a run whose messages go to a full disk.
        if stream is not sys.stderr or error.errno not in OUTPUT_LOST:
            raise


def _to_nowhere(stream: TextIO) -> None:
    """Discard further output to a closed pipe, including the interpreter's final flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def close() -> None:
    """Flush both streams, ignoring a closed pipe, and a full disk, which has been reported."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _to_nowhere(stream)


_READABLE = 100


def parts(text: str) -> str:
    """Return a line of parts separated by ` · `, folded between parts if it is wider than the terminal."""
    columns, separator = width(), " · "
    first, *others = text.split(separator)
    lines = [first]
    for part in others:
        longer = f"{lines[-1]}{separator}{part}"
        if len(longer) <= columns:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def paragraphs(text: str, indent: str = "") -> str:
    """Return `text` with its paragraphs, separated by blank lines, folded; an indented paragraph is not folded."""
    columns = min(width(), _READABLE)
    folded: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith(" "):
            folded.append(textwrap.indent(paragraph, indent))
            continue
        folded.append(
            textwrap.fill(
                " ".join(paragraph.split()),
                columns,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(folded)


def shown(path: Path) -> str:
    """Return a path as a user would type it: relative to the working folder if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically.

    A link itself is replaced, not its target. Devices and pipes, such as /dev/stdout, are written to directly.

    Raises:
        RLinfError: the file cannot be written.
    """
    from rlinf_core.foreign.files import write_fault
    from rlinf_core.runners.storage import durable

    try:
        if path.is_relative_to("/dev") or path.is_relative_to("/proc") or (path.exists() and not path.is_file()):
            # For a folder, this raises the error to report.
            path.write_text(text, encoding="utf-8")
            return
        before = path.lstat().st_mode if os.path.lexists(path) else 0
        durable.write_whole(path, text, mode=before & 0o777 if stat.S_ISREG(before) else 0o666)
    except OSError as error:
        raise RLinfError(f"cannot write `{path}`", why=write_fault(path, error)) from error


# -P: nothing is imported from the working folder.
COMMAND: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "rlinf_cli")


def reason(errors: str, status: int) -> str:
    """Return in one line the error and cause of a failed `COMMAND`, from its standard error and exit status."""
    lines = errors.strip().splitlines() or [f"exit status {status}"]
    why = next((line.strip().removeprefix("why: ") for line in lines if line.strip().startswith("why: ")), None)
    return lines[0].removeprefix("error: ") + (f": {why}" if why else "")
