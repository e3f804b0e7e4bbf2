"""The protobuf messages against the stored surface of the SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.serve.wire.requests_and_results import PASS_MESSAGE, PASS_RESULT, SAMPLE_RESULT

SURFACE = Path(__file__).parents[4] / "integration/recipes/serve/sdk_surface.json"
STORED: dict[str, dict[str, str]] = json.loads(SURFACE.read_text())["messages"]
# Types that are written alike on the wire: integers of all kinds, and enumerations.
VARINTS = {3: 5, 13: 5, 14: 5}


def check_like(descriptor: Any, name: str) -> int:
    """Check the fields of a message against those of the SDK with the same numbers; return how many there are."""
    theirs = {int(field.split()[0]): field.split()[1:] for field in STORED[name].values()}
    count = 0
    for field in descriptor.fields:
        kind, *message = theirs[field.number]
        assert VARINTS.get(field.type, field.type) in (VARINTS.get(int(kind), int(kind)), 12), field.name
        count += 1
        # Messages that are only told apart are bytes here, and the types of maps are not listed.
        if message and field.message_type is not None and message[0] in STORED:
            count += check_like(field.message_type, message[0])
    return count


@pytest.mark.parametrize(
    ("message", "name", "fields"),
    [
        (PASS_MESSAGE, "ForwardBackwardRequest", 13),
        (PASS_RESULT, "ForwardBackwardOutput", 6),
        (SAMPLE_RESULT, "SampleResponse", 15),
    ],
)
def test_messages_have_the_numbers_of_the_sdk(message: Any, name: str, fields: int) -> None:
    assert check_like(message.DESCRIPTOR, name) == fields
