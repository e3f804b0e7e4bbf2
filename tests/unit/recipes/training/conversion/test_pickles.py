"""Pickle streams as data: plain values come back, and nothing that a stream names is called."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.training.conversion import pickles
from recipes.training.conversion.pickles import PickleReader, check_plain
from tests.payloads import code, pickled

SCALARS = st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    read = PickleReader().read(pickle.dumps(value, protocol))
    assert read == value
    check_plain(read)


def streams(marker: Path) -> dict[str, bytes]:
    """Return streams that run code in Python's own reader, each by other instructions."""
    line = code(marker).strip().encode()
    text = b"X" + len(line).to_bytes(4, "little") + line
    quoted = b"S" + repr(line.decode()).encode() + b"\n"
    return {
        "reduce": b"\x80\x02cbuiltins\nexec\n" + text + b"\x85R.",
        "stack_global": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93" + text + b"\x85R.",
        "inst": b"(" + quoted + b"ibuiltins\nexec\n.",
        "obj": b"(cbuiltins\nexec\n" + quoted + b"o.",
        "text": b"cbuiltins\nexec\n(" + quoted + b"tR.",
        "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0dexec.__call__\x93" + text + b"\x85R.",
        "in_a_key": b"\x80\x02}cbuiltins\nexec\n" + text + b"\x85RK\x01s.",
        "popped": b"\x80\x02cbuiltins\nexec\n" + text + b"\x85R0N.",
    }


NAMES = sorted(streams(Path()))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_stream_names_is_called(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    stream = streams(marker)[name]
    with pytest.raises(ValueError, match=r"never executed|opcode"):
        PickleReader().read(stream)
    assert not marker.exists()
    pickle.loads(stream)
    assert marker.exists()  # the stream does what it is meant to


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02ccollections\nOrderedDict\n)\x81.",
        b"\x80\x02Nc__main__\nx\nb.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}NNs.",
        b"\x80\x02h\x07.",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02]",
        b"",
        b"\x82\x01.",
    ],
    ids=["newobj", "build", "reference", "call_number", "append", "key", "memo", "two", "no_end", "empty", "extension"],
)
def test_streams_of_no_checkpoint_are_refused(stream: bytes) -> None:
    with pytest.raises(ValueError, match=r"it |key|exhausted|expected 1"):
        PickleReader().read(stream)


@given(st.data())
def test_damaged_streams_raise_value_errors_alone(data: st.DataObject) -> None:
    stream = bytearray(pickle.dumps({"a": [1, (2.0, "x")], "b": {"c": None}}, 4))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    raised: list[type[Exception]] = []
    try:
        PickleReader().read(bytes(stream))
    except Exception as error:
        raised.append(type(error))
    assert raised in ([], [ValueError]), bytes(stream)


def test_time_and_memory_are_in_proportion_to_the_stream() -> None:
    # Python's own reader takes 32 GiB for this, and for ever to hash what follows.
    assert PickleReader().read(b"\x80\x02Nr\xff\xff\xff\x7f.") is None
    doubled = b"\x80\x02)" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(200))
    with pytest.raises(ValueError, match="mapping key"):
        PickleReader().read(b"\x80\x02}" + doubled[2:] + b"Ns.")
    with pytest.raises(ValueError, match="more objects"):
        check_plain(PickleReader().read(doubled + b"."))
    with pytest.raises(ValueError, match="the limit is"):
        PickleReader().read(bytes(pickles.LIMIT + 1))


def test_names_are_no_plain_values(tmp_path: Path) -> None:
    name = PickleReader().read(b"\x80\x02cos\nsystem\n.")
    assert isinstance(name, str)
    with pytest.raises(ValueError, match="Name"):
        check_plain(name)
    with pytest.raises(ValueError, match="BytesIO"):
        check_plain([io.BytesIO()])
    marker = tmp_path / "marker"
    pickle.loads(pickled(marker))
    assert marker.exists()
