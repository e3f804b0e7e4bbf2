"""Reading, the first stage of loading: from bytes to text to a tree with positions.

Every error becomes a diagnostic at its place: no content of a file or a pipe raises an exception.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from typing import BinaryIO, Final, Literal

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.tree import (
    STDIN_NAME,
    Entry,
    MappingNode,
    Node,
    Path,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    name_pieces,
    part,
)
from rlinf_core.config.yaml_tree import compose
from rlinf_core.foreign.budget import in_words
from rlinf_core.foreign.files import BadFileError, open_regular
from rlinf_core.foreign.strict_json import wide_encoding
from rlinf_core.suggest import near

# The maximum size of a file.
MOST_BYTES = 8 * 1024 * 1024
_BOM = "\ufeff"
# Seconds between two checks for signals while waiting for a terminal.
_WAKE_SECONDS = 0.2
# All characters but the printable ones of YAML 1.2 (production 1, c-printable), and the line ends of YAML 1.1, which
# are ordinary characters in 1.2 but not to the parser. The ASCII part of that set suffices for most files.
_CONTROL = "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
_ASCII_CONTROL = "[^\t\n\r\x20-\x7e]"
_HEADER: Final = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n|%[^\n]*\n)*")
_VERSION: Final = re.compile(r"^%YAML(?![^\s])[ \t]*([^\n#]*?)[ \t\r]*(?:#[^\n]*)?$", re.MULTILINE)
COMPONENT_PLACEMENT: Final[Path] = ("cluster", "component_placement")


def load_source(
    name: str, diagnostics: Diagnostics, *, stdin: bytes | None = None, is_base: bool = False
) -> SourceText | None:
    """Return the text of a file, or of standard input for the name `-`; None after reporting why it cannot be read.

    A pipe or a device is refused at once, unless a shell passes it as `/dev/stdin` or `/dev/fd/N`.

    Args:
        name: the file.
        diagnostics: receives findings.
        stdin: replaces the process's standard input.
        is_base: whether another file names it, in which case it must be a regular file.
    """
    if name == "-":
        try:
            data = stdin if stdin is not None else _read_stdin(MOST_BYTES + 1)
        except OSError as error:
            diagnostics.add(_unreadable(SourceText(STDIN_NAME, "", "stdin"), error))
            return None
        return decode(STDIN_NAME, data, diagnostics, "stdin")
    try:
        if os.path.isdir(name):
            raise IsADirectoryError
        is_handed = not is_base and name.startswith(("/dev/stdin", "/dev/fd/"))
        with open(name, "rb") if is_handed else open_regular(name) as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        diagnostics.add(_unreadable(SourceText(name, ""), error))
        return None
    return decode(name, data, diagnostics)


def decode(
    name: str, data: bytes, diagnostics: Diagnostics, kind: Literal["file", "stdin"] = "file"
) -> SourceText | None:
    """Return the bytes of a file as text; None after reporting why they are not text.

    Leading byte order marks are dropped, and a carriage return without a line feed becomes a line feed.
    """
    if len(data) > MOST_BYTES:
        place = Span(SourceText(name, "", kind), 0, 0)
        message = f"the file is larger than {in_words(MOST_BYTES)}, the limit for a configuration"
        diagnostics.error("file-too-large", message, place, help="is this the right file?")
        return None
    try:
        text = data.decode("utf-8").lstrip(_BOM)
    except UnicodeDecodeError as error:
        diagnostics.add(_not_utf8(name, data, kind, error))
        return None
    if "\r" in text:
        text = re.sub("\r(?!\n)", "\n", text)
    source = SourceText(name, text, kind)
    return source if _printable(source, 0, len(text), diagnostics) else None


def read(source: SourceText, diagnostics: Diagnostics) -> MappingNode | None:
    """Return the tree of a whole file; None after reporting why there is none.

    A syntax error stops the reading and is reported alone. Other errors are reported and the tree is still built: a
    duplicate key keeps its first value, a tag is ignored, and an undefined alias is null.
    """
    is_yaml, root = read_document(source, diagnostics)
    if isinstance(root, MappingNode) or not is_yaml:
        return root if isinstance(root, MappingNode) else None
    diagnostics.add(_not_a_mapping(source, root))
    return None


def read_document(source: SourceText, diagnostics: Diagnostics) -> tuple[bool, Node | None]:
    """Return whether a file is YAML, and its value, None for a file without content."""
    prefix = _shared_indentation(source.text)
    if prefix:
        with_what = "tab" if "\t" in prefix else "blanks"
        first = len(source.text) - len(source.text.lstrip("\r\n"))
        message = f"every line starts with the same {with_what}, which {'is' if with_what == 'tab' else 'are'} ignored"
        help, span = "remove the indentation from every line", Span(source, first, first + len(prefix))
        diagnostics.add(Diagnostic("indented-file", Severity.WARNING, message, span, help=help))
    text = _without_versions(source, _with_blanks_for_tabs(source.text, prefix), diagnostics)
    return compose(source, text, 0, len(source.text), diagnostics)


def _shared_indentation(text: str) -> str:
    """Return the blanks and tabs that all non-blank lines start with."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines or lines[0][0] not in " \t":
        return ""
    prefix = lines[0][: len(lines[0]) - len(lines[0].lstrip(" \t"))]
    for line in lines:
        while not line.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


def _with_blanks_for_tabs(text: str, prefix: str) -> str:
    """Return a text with the tabs in the prefix of its lines replaced by blanks, which keeps offsets."""
    if "\t" not in prefix:
        return text
    size = len(prefix)
    return "\n".join(line[:size].replace("\t", " ") + line[size:] for line in text.split("\n"))


def _without_versions(source: SourceText, text: str, diagnostics: Diagnostics) -> str:
    """Return a text with its `%YAML` lines, which have no effect, made comments; report versions other than 1.2."""
    header = _HEADER.match(text)
    for number, directive in enumerate(list(_VERSION.finditer(text, 0, header.end() if header else 0))):
        if directive[1] != "1.2" or number:
            message = f"the file asks for YAML {directive[1][:9]}, but it is read as YAML 1.2"
            help = "remove the line; in YAML 1.2 `on` and `yes` are text, and `010` is ten"
            span = Span(source, directive.start(), directive.start() + len(directive[0].rstrip()))
            diagnostics.error("yaml-version", message, span, help=help)
        text = f"{text[: directive.start()]}#{text[directive.start() + 1 :]}"
    return text


def split_components(node: Node, path: Path, diagnostics: Diagnostics) -> Node:
    """Return a value at `path` with one entry for each component of `cluster.component_placement`.

    `actor,env: 0-3` becomes two entries, each with its part of the key. A component that is placed twice is reported,
    and keeps its first placement. A key with a missing name is unchanged, and the model rejects it.
    """
    if not isinstance(node, MappingNode) or path != COMPONENT_PLACEMENT[: len(path)]:
        return node
    if path != COMPONENT_PLACEMENT:
        inner = node.entry(key := str(COMPONENT_PLACEMENT[len(path)]))
        if inner is None:
            return node
        split = Entry(inner.key, split_components(inner.value, (*path, key), diagnostics))
        return MappingNode(node.span, tuple(split if entry is inner else entry for entry in node.entries))
    entries: dict[str, Entry] = {}
    for whole in node.entries:
        pieces = name_pieces(whole.key.raw)
        if not all(name for name, _, _ in pieces):
            entries[whole.key.raw] = whole
            continue
        for name, start, end in pieces:
            key = ScalarNode(part(whole.key, start, end) or whole.key.span, name, name, whole.key.plain)
            first = entries.setdefault(name, Entry(key, whole.value)).key
            if first is not key:
                message = f"component `{name}` is placed twice"
                help = "write one entry per component; an entry may list several parts, as in `0-3,8-11`"
                related = ((first.span, "first placed at"),)
                diagnostics.error("component-twice", message, key.span, (*path, name), help, related)
    return MappingNode(node.span, tuple(entries.values()))


def read_value(source: SourceText, start: int, end: int, diagnostics: Diagnostics) -> Node | None:
    """Return the YAML value of a piece of a larger text, null for an empty piece; None after reporting an error."""
    if not _printable(source, start, end, diagnostics):
        return None
    errors = diagnostics.count(Severity.ERROR)
    is_yaml, root = compose(source, f" {source.text[start:end]}", start, end, diagnostics)
    if not is_yaml or diagnostics.count(Severity.ERROR) > errors:
        return None
    return root if root is not None else ScalarNode(Span(source, start, start), "", None)


def _printable(source: SourceText, start: int, end: int, diagnostics: Diagnostics) -> bool:
    control = re.compile(_ASCII_CONTROL if source.text.isascii() else _CONTROL)
    match = control.search(source.text, start, end)
    if match is None:
        return True
    message = f"the character U+{ord(match[0]):04X} is not allowed in YAML"
    if match[0] == "\0":
        message += "; this looks like a binary file"
    span = Span(source, match.start(), match.end())
    help = "remove it, or write it as an escape in double quotes, such as `\\x1b`"
    diagnostics.error("control-character", message, span, help=help)
    return False


def _not_utf8(name: str, data: bytes, kind: Literal["file", "stdin"], error: UnicodeDecodeError) -> Diagnostic:
    before = data[: error.start].decode("utf-8")
    text = (before + data[error.start :].decode("utf-8", "replace")).lstrip(_BOM)
    at = len(before.lstrip(_BOM))
    help = "save the file as UTF-8"
    if (other := wide_encoding(data)) is not None:
        message = f"the file is {other}, but a configuration is UTF-8"
    elif b"\0" in data:
        message, help = "this is a binary file, not text", "is this the right file?"
    else:
        message = f"the byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
    return Diagnostic(
        "not-utf8", Severity.ERROR, message, Span(SourceText(name, text, kind), at, min(at + 1, len(text))), (), help
    )


def _read_stdin(size: int) -> bytes:
    # Python has no standard input if it was closed when the process started.
    stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if stream is None:
        return b""
    if not stream.isatty():
        return stream.read(size)
    data = b""
    while len(data) < size:
        # A signal that arrives just before a read blocks is handled after the read, at a terminal perhaps never.
        while not select.select([stream], [], [], _WAKE_SECONDS)[0]:
            pass
        line = os.read(stream.fileno(), size - len(data))
        if not line:
            break
        data += line
    return data


def _unreadable(source: SourceText, error: OSError | ValueError) -> Diagnostic:
    place = Span(source, 0, 0)
    code, help = "unreadable-file", None
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        code, message, help = "missing-file", "no such file", _similar_file(source.name)
    elif isinstance(error, IsADirectoryError):
        code, message, help = "is-directory", "this is a directory, not a file", "name a file in it"
    elif isinstance(error, BadFileError):
        message, help = f"this {error.strerror}", "name a file, or write `-` to read standard input"
    elif isinstance(error, OSError):
        # PermissionError, a loop of links, a name that is too long, a failing disk.
        reason = error.strerror or str(error)
        message = f"the file cannot be read: {reason.lower()}"
        if error.errno == errno.EACCES:
            help = "make it readable for your user"
    else:
        message = f"the file cannot be read: {error}"
    return Diagnostic(code, Severity.ERROR, message, place, (), help)


def _similar_file(name: str) -> str | None:
    directory, base = os.path.split(name)
    try:
        names = os.listdir(directory or ".")
    except (OSError, ValueError):
        return f"there is no directory `{directory or os.curdir}`"
    # Compared without extensions, which would make any two short names similar.
    stem, ending = os.path.splitext(base)
    endings = (".yaml", ".yml", ending or ".yaml")
    likely = sorted(names, key=lambda name: (name.endswith(endings), name.endswith(endings[-1])))
    stems = {os.path.splitext(name)[0]: name for name in likely}
    similar = near(stem, stems)
    return f"did you mean `{os.path.join(directory, stems[similar[0]])}`?" if similar else None


def _not_a_mapping(source: SourceText, root: Node | None) -> Diagnostic:
    if root is None or (isinstance(root, ScalarNode) and not root.raw and root.plain):
        message = "the file is empty" if not source.text.strip() else "the file has no content"
        return Diagnostic(
            "empty-file", Severity.ERROR, message, Span(source, 0, 0), (), "a configuration has at least `cluster:`"
        )
    help = "write `key: value` lines; a configuration has at least `cluster:`"
    kind = "a list" if isinstance(root, SequenceNode) else "a single value"
    if isinstance(root, ScalarNode) and re.match(r"[A-Za-z_][\w.-]*:\S", root.raw) and root.plain:
        help = "write a space after each `:`"
    span = root.span
    first_line_end = source.text.find("\n", span.start)
    end = span.end if first_line_end < 0 else min(span.end, first_line_end)
    message = f"the top level of a configuration is a mapping, but this is {kind}"
    return Diagnostic("not-a-mapping", Severity.ERROR, message, Span(source, span.start, end), (), help)
