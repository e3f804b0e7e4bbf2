"""Files of torch.save, and pickle streams, as data: the same values, and nothing that they name is called."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.training.conversion import archives
from recipes.training.conversion.archives import FileSlice, PickleReader, check_plain, load_archive, read_archive
from tests.payloads import Payload, archived, code, pickled


def saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.size() == other.size() and one.stride() == other.stride()
        return alike and bytes(one.reshape(-1).view(torch.uint8)) == bytes(other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TYPES += [torch.uint32, torch.float8_e4m3fn, torch.int8, torch.int16, torch.int32, torch.uint16]


@given(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_tensors_of_all_types_and_layouts_come_back(dtype: torch.dtype, size: list[int], turned: bool) -> None:
    tensor = torch.randint(0, 2, size).to(dtype)
    tensor = tensor.permute(*reversed(range(len(size)))) if turned and size else tensor
    assert same(tensor, read_archive(saved({"t": tensor}))["t"])


def test_states_of_modules_and_optimizers_come_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    value = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parts": torch.arange(10)[3:7],
        "weight": torch.nn.Parameter(torch.ones(2)),
        "plain": [None, True, 3, 2**70, 1.5, "x", (1, 2)],
    }
    stream = saved(value)
    assert same(read_archive(stream), torch.load(io.BytesIO(stream.getvalue()), weights_only=True))


def test_a_part_of_a_file_is_read_as_a_file() -> None:
    content = saved(torch.arange(5)).getvalue()
    whole = io.BytesIO(b"before" + content + b"after")
    part = io.BufferedReader(FileSlice(whole, 6, len(content)))
    assert part.read() == content
    assert torch.equal(read_archive(FileSlice(whole, 6, len(content))), torch.arange(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [False, True])
def test_code_in_an_archive_is_refused(tmp_path: Path, hidden: bool) -> None:
    file, marker = tmp_path / "state.pt", tmp_path / "marker"
    if hidden:
        torch.save({"updates": 3, "temperature": torch.ones(2), "more": [Payload(marker)]}, file)
    else:
        file.write_bytes(archived(marker))
    with pytest.raises(ValueError, match=r"`builtins.exec`, which is never executed|`__builtin__.exec`"):
        load_archive(file)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists()


def rewritten(change: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    parts: dict[str, bytes] = {}
    with zipfile.ZipFile(saved(torch.arange(6.0))) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return stream


def other_tensor(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Callable[[dict[str, bytes]], None]:
    def change(parts: dict[str, bytes]) -> None:
        # By hand: torch refuses to make such tensors.
        parts["archive/data.pkl"] = (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
            b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
            + b"".join(_stack(item) for item in (offset, size, stride))
            + b"\x89NtR."
        )

    return change


def _stack(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"").replace(b"q\x01", b"")


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        *(((7,), (1,), 0), ((6,), (1,), 1), ((2, 3), (6, 1), 0), ((1000000, 6), (0, 1), 0), ((2,), (-1,), 2)),
        *(((6,), (), 0), ((2**61, 2**61, 0), (0, 0, 0), 0)),
    ],
)
def test_tensors_beyond_their_storage_are_refused(size: Any, stride: Any, offset: int) -> None:
    with pytest.raises(ValueError, match=r"storage|integer|shape"):
        read_archive(rewritten(other_tensor(size, stride, offset)))
    read_archive(rewritten(other_tensor((2, 3), (3, 1))))


def test_archives_that_grow_or_lack_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="compressed"):
        read_archive(rewritten(lambda parts: None, zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="no record `data/0`"):
        read_archive(rewritten(lambda parts: parts.pop("archive/data/0")))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"not a `torch.save` file,"):
        read_archive(io.BytesIO(b"nothing"))


@given(st.data())
def test_damage_is_found_or_without_effect(data: st.DataObject) -> None:
    value = {"a": torch.arange(20.0), "b": 3}
    content = bytearray(saved(value).getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = read_archive(io.BytesIO(bytes(content)))
    except ValueError:
        return
    assert same(read, value)


def test_a_pipe_is_no_archive_and_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.pt")
    with pytest.raises(OSError, match="not a regular file"):
        load_archive(tmp_path / "state.pt")


SCALARS = st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers()
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=20
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


STREAMS = {
    "newobj": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "build": b"\x80\x02Nc__main__\nx\nb.",
    "reference": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "call_number": b"\x80\x02K\x01)R.",
    "append": b"\x80\x02K\x01K\x02a.",
    "key": b"\x80\x02}NNs.",
    "memo": b"\x80\x02h\x07.",
    "two": b"\x80\x02K\x01K\x02.",
    "no_end": b"\x80\x02]",
    "empty": b"",
    "extension": b"\x82\x01.",
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
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
        PickleReader().read(bytes(archives.LIMIT + 1))


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
