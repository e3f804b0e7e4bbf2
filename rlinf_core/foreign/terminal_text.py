"""Text that others wrote, on a terminal: what a terminal would act on is shown instead.

A line of a worker, an error, a field of a run's file or the name of a file can hold sequences that set the title, fill
the clipboard, erase what stands above, or turn the direction of the text.
"""

from __future__ import annotations

import re
from typing import Final

# C0 but tab and newline, DEL, C1, the separators of lines and paragraphs, and what turns the direction of text.
_ACTED_ON: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return a text with every character that a terminal acts on, but tab and newline, as an escape such as `\\x1b`."""
    text = text.replace("\r\n", "\n")
    return _ACTED_ON.sub(lambda match: escape_of(match[0]), text)


def replaced(text: str) -> str:
    """Return a text of the same length, in which characters that a terminal acts on are replaced by U+FFFD."""
    return _ACTED_ON.sub("\ufffd", text)


def escape_of(character: str) -> str:
    """Return the escape of a character as Python and YAML write it, such as `\\x1b`."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
