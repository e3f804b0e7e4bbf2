"""Requests with mistakes, drawn by seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

WRONG: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, 0.5, "", "0", "x" * 5000, "../../etc", "tinker://", "\ud800",
    "\0", [], {}, [[]], [None], {"": {}}, [{"type": "image"}], [10**9], ["a", 1],
]  # fmt: skip
HOSTILE = (b"", b"[]", b"null", b"7", b"{", b'{"a": NaN}', b"\xff\xfe{}", b"[" * 5000, b'{"seq_id": 1, "seq_id": 2}')


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value but itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in items for place in ((*path, key), *places(part, (*path, key)))]


def mutated(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object with one to three mistakes."""
    changed = json.loads(json.dumps(fields))
    for _ in range(draw.randint(1, 3)):
        *above, key = draw.choice(places(changed) or [("new",)])
        parent = changed
        for step in above:
            parent = parent[step]
        if draw.random() < 0.2 and isinstance(parent, dict):
            parent.pop(key, None)
            parent["unknown"] = copy.deepcopy(draw.choice(WRONG))
        else:
            parent[key] = copy.deepcopy(draw.choice(WRONG))
    return changed


def garbled(draw: random.Random, body: bytes) -> bytes:
    """Return bytes of which some are changed, lost, or there twice."""
    start, length = draw.randrange(len(body)), draw.randint(1, 12)
    cut = body[start : start + length]
    middle = draw.choice([b"", cut + cut, draw.randbytes(len(cut)), bytes(255 - byte for byte in cut)])
    return body[:start] + middle + body[start + length :]
