"""The secret values that this process knows, and their masking in any text that is kept or shown.

They are the values of keys and variables whose names look secret (see `rlinf_core.config.secrets`), values that
references inserted elsewhere, and tokens read from files. Code that writes text to a file of the run, a log or the
terminal passes it through `hidden`, since any error may quote its input.

Values shorter than 6 characters, numbers of up to 11 characters, and words such as `true` are not masked: they occur
in harmless text. Only the newest 1000 values are kept.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    import logging

MASK: Final = "********"
SHORTEST: Final = 6
_MOST: Final = 1000
_SHORTEST_LINE: Final = 16
_PLAIN: Final = re.compile(r"true|false|null|none|[-+]?[0-9][0-9.]{0,10}|-----(BEGIN|END)[A-Z ]+-----", re.IGNORECASE)

_lock = threading.Lock()
_values: dict[str, None] = {}
_pattern: re.Pattern[str] | None = None


def remember(values: Iterable[str]) -> None:
    """Mask these values from now on; of a value of several lines, also each line of at least 16 characters."""
    global _pattern
    with _lock:
        for value in values:
            lines = (line.strip() for line in value.splitlines()) if "\n" in value else ()
            for part in (value.strip(), *(line for line in lines if len(line) >= _SHORTEST_LINE)):
                if len(part) >= SHORTEST and not _PLAIN.fullmatch(part):
                    _values.pop(part, None)
                    _values[part] = None
        for oldest in list(_values)[: max(0, len(_values) - _MOST)]:
            del _values[oldest]
        # The longest first, since one value may begin with another.
        forms = sorted({form for value in _values for form in _forms(value)}, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, forms))) if forms else None


def known() -> tuple[str, ...]:
    """Return the values, for another process that must mask them, too."""
    with _lock:
        return tuple(_values)


def forget() -> None:
    """Forget all values."""
    global _pattern
    with _lock:
        _values.clear()
        _pattern = None


def hidden(text: str) -> str:
    """Return a text with every secret value masked, in plain, JSON and URL form."""
    pattern = _pattern
    return text if pattern is None else pattern.sub(MASK, text)


def hiding_formatter(format: str) -> logging.Formatter:
    """Return a formatter of log lines that masks secret values."""
    import logging  # many commands do not log

    class HidingFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return hidden(super().format(record))

    return HidingFormatter(format)


def _forms(value: str) -> tuple[str, ...]:
    return value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")
