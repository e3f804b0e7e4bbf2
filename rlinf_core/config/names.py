"""Comma-separated names: `actor, env` as a key of `component_placement`, `a800,4090` as a `node_group`."""

from __future__ import annotations

from typing import NamedTuple


class NamePiece(NamedTuple):
    """One of several names, stripped; `start` and `end` are its offsets in the whole text."""

    name: str
    start: int
    end: int


def name_pieces(text: str) -> list[NamePiece]:
    """Return the pieces between commas; one between two commas is empty."""
    pieces: list[NamePiece] = []
    at = 0
    for piece in text.split(","):
        name = piece.strip()
        start = at + len(piece) - len(piece.lstrip()) if name else at + len(piece)
        pieces.append(NamePiece(name, start, start + len(name)))
        at += len(piece) + 1
    return pieces
