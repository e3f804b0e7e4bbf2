"""Log lines without secret values. Apart from `known_secrets`, which commands import that log nothing."""

from __future__ import annotations

import logging

from rlinf_core.process.known_secrets import hidden


class HidingFormatter(logging.Formatter):
    """A formatter of log lines that masks secret values."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return hidden(super().format(record))
