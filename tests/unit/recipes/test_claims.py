"""Files and messages of a few KB that claim gigabytes: each reader refuses them before it takes memory."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from starlette.requests import Request

from recipes.agent.tools.computing_tools import read_corpus
from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.hdf5 import read_hdf5
from recipes.demonstrations.lerobot.set_files import read_parquet
from recipes.demonstrations.lerobot.set_info import INFO, read_info
from recipes.demonstrations.pictures import decoded
from recipes.embodied.envs.env_state import unpack
from recipes.embodied.off_policy.segments import MAGIC, read_segments
from recipes.language.data.problem_sources import check_file, read_file
from recipes.language.loopback_server import RequestError, json_body
from recipes.sections.model_folders import fault_of_weights
from recipes.serve.service.requests_and_results import read_data, read_pass
from recipes.serve.service.state_file import StateFile, state_folder
from recipes.training.arrays import read_arrays
from recipes.training.conversion.archives import load_archive
from recipes.training.tensor_files import read_tensors, stored_shapes
from rlinf_core import ConfigError
from rlinf_core.errors import RunError
from tests.peak_memory import take_peak
from tests.unit.recipes.serve.served import empty_tensors

pytestmark = pytest.mark.security
_MOST_MIB: Final = 200
_MOST_BYTES: Final = 10 << 10

Reader = Callable[[Path], Any]
# By name: writes a file, reads it, and what it raises or returns.
CASES: dict[str, tuple[Callable[[Path], None], Reader, type[Exception] | None, str]] = {}


def case(name: str, read: Reader, error: type[Exception] | None, words: str) -> Callable[[Any], Any]:
    """Add a case, whose file the function writes."""

    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[name] = (write, read, error, words)
        return write

    return add


def read_problems(file: Path) -> Any:
    return read_file(str(file), "prompt", "answer")


@case("lines.jsonl.gz", read_problems, ConfigError, "lines.jsonl.gz` claims")
def many_rows(file: Path) -> None:
    file.write_bytes(gzip.compress(b"[" + b"{}," * 3_000_000 + b"{}]", 9))


@case("blank.jsonl.gz", read_problems, ConfigError, "blank.jsonl.gz` claims 128 MiB up to line ")
def many_blank_lines(file: Path) -> None:
    file.write_bytes(gzip.compress(b"\n" * 9_000_000, 9))


@case("numbers.jsonl.gz", read_problems, ConfigError, "numbers.jsonl.gz` claims")
def many_numbers(file: Path) -> None:
    file.write_bytes(gzip.compress(b'{"prompt": [' + b"1," * 3_000_000 + b"1]}", 9))


@case("corpus.txt", lambda file: read_corpus(str(file)), ConfigError, "is larger than 4096 MiB")
def corpus_of_holes(file: Path) -> None:
    requests_of_holes(file)


def write_parquet(file: Path, columns: dict[str, Any], **options: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), file, compression="zstd", **options)


def one_text(rows: int, length: int = 1 << 20) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), arrow.array(["x" * length]))


@case("texts.parquet", read_problems, ConfigError, "up to row 63")
def one_text_in_many_rows(file: Path) -> None:
    write_parquet(file, {"prompt": one_text(10_000), "answer": one_text(10_000)})


@case("checked.parquet", lambda file: check_file(str(file), "prompt", "answer"), ConfigError, "up to row 126")
def one_text_in_the_first_rows(file: Path) -> None:
    write_parquet(file, {"prompt": one_text(10_000), "answer": np.arange(10_000) % 2 == 0})


@case("lists.parquet", read_problems, ConfigError, "up to row ")
def one_text_in_messages(file: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    message = arrow.StructArray.from_arrays([one_text(10_000, 1 << 16), one_text(10_000, 1 << 16)], ["role", "content"])
    lists = arrow.ListArray.from_arrays(np.arange(0, 10_001, 2, dtype=np.int32), message)
    write_parquet(file, {"prompt": lists, "answer": np.zeros(5000)})


@case("constant.parquet", read_problems, ConfigError, "up to `answer`")
def one_number_in_many_rows(file: Path) -> None:
    write_parquet(file, {"answer": np.zeros(2_200_000, np.int8)})


@case("rows.parquet", read_parquet, DatasetError, "a file of the data set claims")
def lerobot_rows(file: Path) -> None:
    write_parquet(file, {"task_index": np.zeros(10_000), "task": one_text(10_000)})


def read_set(file: Path) -> Any:
    (file.parent / "set" / INFO).parent.mkdir(parents=True)
    file.rename(file.parent / "set" / INFO)
    return read_info(file.parent / "set")


@case("info.json", read_set, DatasetError, "description of the data set is invalid")
def lerobot_pictures(file: Path) -> None:
    image = {"dtype": "image", "shape": [60_000, 60_000, 3], "names": None}
    totals = {"total_episodes": 1, "total_frames": 1, "total_tasks": 1, "data_path": "a"}
    file.write_text(json.dumps({"codebase_version": "v3.0", "fps": 5, "features": {"camera": image}, **totals}))


def write_demo(file: Path, add: Callable[[Any], None]) -> None:
    with pytest.importorskip("h5py").File(file, "w") as opened:
        demo = opened.create_group("data/demo_0")
        demo.create_group("obs")
        add(demo)


@case("rows.hdf5", read_hdf5, DatasetError, "claims 10.4 GiB up to `data/demo_0/actions`")
def rows_never_written(file: Path) -> None:
    write_demo(file, lambda demo: demo.create_dataset("actions", (400_000_000, 7), "f4", chunks=(1 << 20, 7)))


@case("few.hdf5", read_hdf5, DatasetError, "claims 1000 rows, but not all of them were ever written")
def few_rows_never_written(file: Path) -> None:
    def add(demo: Any) -> None:
        demo.create_dataset("actions", (1000, 7), "f4", chunks=(100, 7))[:100] = 1.0

    write_demo(file, add)


@case("whole.hdf5", read_hdf5, DatasetError, "claims 1000 rows, but not all of them were ever written")
def nothing_written(file: Path) -> None:
    write_demo(file, lambda demo: demo.create_dataset("actions", (1000, 7), "f4"))


@case("block.hdf5", read_hdf5, DatasetError, "claims 1.8 GiB up to a block of `data/demo_0/actions`")
def large_block(file: Path) -> None:
    def add(demo: Any) -> None:
        demo.create_dataset("actions", (10, 7), "f4", chunks=(1 << 26, 7), maxshape=(None, 7), compression="gzip")

    write_demo(file, add)


@case("picture.hdf5", read_hdf5, DatasetError, "claims .* up to `data/demo_0/obs/eye`")
def large_picture(file: Path) -> None:
    def add(demo: Any) -> None:
        demo["actions"] = np.zeros((2, 7), np.float32)
        demo["obs"].create_dataset("eye", (2, 60_000, 60_000, 3), "u1", chunks=(1, 64, 64, 3))

    write_demo(file, add)


@case("links.hdf5", read_hdf5, DatasetError, "claims .* up to `")
def groups_with_many_names(file: Path) -> None:
    def add(demo: Any) -> None:
        group = demo["obs"]
        for _ in range(4):
            below = group.create_group("0")
            for name in range(1, 12):
                group[str(name)] = below
            group = below

    write_demo(file, add)


def header(described: object, data: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


LARGE = {"a": {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, 4]}}


@case("shape.safetensors", fault_of_weights, None, "claims that `a` of shape [50000, 50000] has 4 bytes")
def large_tensor(file: Path) -> None:
    file.write_bytes(header(LARGE, bytes(4)))


@case("rows.safetensors", lambda file: stored_shapes([file]), ValueError, "does not fit the file")
def large_tensor_by_rows(file: Path) -> None:
    large_tensor(file)


@case("header.safetensors", fault_of_weights, None, "not a safetensors file, or is truncated")
def large_header(file: Path) -> None:
    file.write_bytes((10 << 30).to_bytes(8, "little") + b"{}")


@case("holes.safetensors", read_tensors, ValueError, "claims 10 GiB up to `a`")
def tensor_of_holes(file: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [10 << 30], "data_offsets": [0, 10 << 30]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + (10 << 30))


@case("overlap.safetensors", read_tensors, ValueError, "does not fit the file")
def tensors_that_overlap(file: Path) -> None:
    """All of whose tensors are the whole of it."""
    size = 10 << 20
    tensors = {str(number): {"dtype": "U8", "shape": [size], "data_offsets": [0, size]} for number in range(100)}
    header = json.dumps(tensors).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)


@case("weights.pt", load_archive, ValueError, "exceeds its storage")
def expanded_tensor(file: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(50_000, 50_000)}, file)


@case("deflated.pt", load_archive, ValueError, "compressed")
def compressed_record(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("a/data.pkl", bytes(9 << 20))


def npy_header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@case("shape.npz", read_arrays, ValueError, "")
def large_array(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", npy_header((50_000, 50_000)))


@case("overlap.npz", read_arrays, ValueError, "claims .* up to `")
def records_that_overlap(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("0.npy", npy_header((1 << 20,)) + bytes(8 << 20))
        for number in range(1, 20):
            again = archive.NameToInfo["0.npy"]
            other = zipfile.ZipInfo(f"{number}.npy")
            for field in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(other, field, getattr(again, field))
            archive.filelist.append(other)


@case("pads.npz", lambda file: unpack([file.read_bytes()] * 2, "s", np.zeros(1, np.int64)), None, "None")
def state_of_another_setup(file: Path) -> None:
    np.savez_compressed(file, setup=np.array("other"), number=np.arange(3))


@case("picture.png", lambda file: decoded(file.read_bytes()), DatasetError, "claims 412 MiB")
def large_png(file: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = chunk(b"IHDR", struct.pack(">IIBBBBB", 12_000, 12_000, 8, 2, 0, 0, 0))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b""))


def reads_damage_alone(file: Path) -> bool:
    damage: list[Any] = []
    return not list(read_segments(file.parent, damage.append)) and len(damage) == 1


@case("segment-1.rlr", reads_damage_alone, None, "True")
def large_record(file: Path) -> None:
    text = json.dumps([["a", "<f8", [50_000, 50_000]]]).encode()
    payload = struct.pack("<I", len(text)) + text
    sizes = struct.pack("<QI", len(payload), zlib.crc32(payload))
    file.write_bytes(MAGIC + sizes + struct.pack("<I", zlib.crc32(sizes)) + payload)


@case("requests.sqlite", lambda file: StateFile(file.parent), RunError, "not a database")
def requests_of_holes(file: Path) -> None:
    file.touch()
    os.truncate(file, 10 << 30)


def read_state(file: Path) -> None:
    file.rename(file.parent / "model.json")
    with state_folder(file.parent, {"width": 4}):
        pass


@case("holes.json", read_state, RunError, "larger than 64 MiB")
def model_of_holes(file: Path) -> None:
    requests_of_holes(file)


@case("pass.pb", lambda file: read_data(read_pass(file.read_bytes())), RequestError, "claims 1 GiB up to datum 0")
def sparse_tensors(file: Path) -> None:
    file.write_bytes(empty_tensors("weights", 100, 1, 1 << 27))


def receive(body: bytes) -> Any:
    async def message() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return asyncio.run(json_body(Request({"type": "http", "headers": []}, message)))


# The sizes of bodies are limited by themselves: the largest one.
@pytest.mark.parametrize("item", [b"[],", b"0,", b'{"a":1},'])
def test_body_of_many_values_is_refused(item: bytes) -> None:
    body = b'{"a":[' + item * ((16 << 20) // len(item) - 10) + b"0]}"
    take_peak()
    before = take_peak()
    with pytest.raises(RequestError, match="the body claims"):
        receive(body)
    assert take_peak() - before < _MOST_MIB


@pytest.mark.parametrize("name", CASES)
def test_claims_are_refused_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    write, read, error, words = CASES[name]
    file = tmp_path / name
    write(file)
    status = file.stat()
    assert min(status.st_size, 512 * status.st_blocks) <= _MOST_BYTES
    take_peak()
    before = take_peak()
    if error is None:
        assert words in str(read(file))
    else:
        with pytest.raises(error) as caught:
            read(file)
        caught.match(words)
    assert take_peak() - before < _MOST_MIB
