"""Escaping of untrusted text for a terminal.

A worker's output, an error, a field of a run's file or a file name can hold sequences that set the title, fill the
clipboard, erase earlier lines, or reverse the direction of text.
"""

from __future__ import annotations

import re
from typing import Final

# C0 but tab and newline, DEL, C1, the separators of lines and paragraphs, and controls of text direction.
_ACTED_ON: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return a text with control characters, except tab and newline, as escapes such as `\\x1b`; CRLF becomes LF."""
    text = text.replace("\r\n", "\n")
    return _ACTED_ON.sub(lambda match: escape_of(match[0]), text)


def replaced(text: str) -> str:
    """Return a text of the same length with control characters, except tab and newline, replaced by U+FFFD."""
    return _ACTED_ON.sub("\ufffd", text)


def encodable(text: str) -> str:
    """Return a text with halves of characters, as in file names that are not UTF-8, as escapes such as `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_of(character: str) -> str:
    """Return the escape of a character as Python and YAML write it, such as `\\x1b`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
