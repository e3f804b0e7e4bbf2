"""Files that would run code if a reader executed what they say. The code writes a marker, and nothing else."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    """Return a line of Python that writes the marker."""
    return f"open({str(marker)!r}, 'a').write('x')\n"


def pickled(marker: Path) -> bytes:
    """Return a pickle that runs code."""
    return pickle.dumps(Payload(marker))


def archived(marker: Path) -> bytes:
    """Return a file of `torch.save` whose loading runs code."""
    stream = io.BytesIO()
    torch.save(Payload(marker), stream)
    return stream.getvalue()
