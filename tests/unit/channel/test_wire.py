from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.channel import wire
from rlinf_core.collective.message import encode
from rlinf_core.errors import PayloadError

ID_STEP = st.integers(0, 2**64 - 1)


def through(item: object) -> Any:
    encoded = encode(item)
    return wire.unpack_item(wire.pack_item(encoded.head, encoded.parts))


@given(st.sampled_from(wire.RequestKind), st.booleans(), ID_STEP, st.text(max_size=20))
def test_requests_survive(ask: wire.RequestKind, wait: bool, op_id: int, key: str) -> None:
    assert wire.unpack_request(wire.pack_request(ask, op_id, key.encode(), wait)) == (ask, wait, op_id, key)


@given(
    st.sampled_from(wire.ReplyKind),
    ID_STEP,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
)
def test_replies_survive(say: wire.ReplyKind, op_id: int, place: int, total: int, ack_slot: int) -> None:
    reply = (say, op_id, place, total, ack_slot)
    assert wire.unpack_reply(wire.pack_reply(*reply)) == reply


@dataclass
class Step:
    action: np.ndarray[Any, Any]
    info: dict[str, object]


def test_arrays_in_a_packed_item_are_writable_and_its_own() -> None:
    source = Step(np.arange(6, dtype=np.float32).reshape(2, 3), {"empty": np.empty(0), "n": 7})
    one, other = through(source), through(source)
    one.action[:] = -1
    assert (other.action == source.action).all()
    assert other.info["empty"].size == 0
    assert other.info["n"] == 7


def test_an_item_that_does_not_unpickle_is_a_payload_error() -> None:
    with pytest.raises(PayloadError, match="cannot be rebuilt"):
        wire.unpack_item(wire.pack_item(pickle.dumps(Step)[:-3], []))


class Planted:
    """Runs a function where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("it ran",)


ran: list[str] = []


def test_plain_data_comes_back_and_runs_nothing() -> None:
    puts = [(16, 0.5, b"item"), (32, 1.0, b"")]
    assert wire.unpack_plain(wire.pack(puts)) == puts
    with pytest.raises(pickle.UnpicklingError, match="no plain data"):
        wire.unpack_plain(wire.pack([(16, 1.0, Planted())]))
    assert not ran
