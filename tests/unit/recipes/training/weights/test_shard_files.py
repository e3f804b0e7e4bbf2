"""Shards in safetensors: written by several ranks and read by others, by torch's reader too; what is wrong is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import checkpoint as dcp

from recipes.training.tensor_files import Described, TensorFile, check_parts, tensors_in
from recipes.training.weights.shard_files import ShardReader, about_shards, shard_name
from recipes.training.weights.training_state import load_weights
from rlinf_core.errors import CheckpointError
from tests.unit.recipes.training.ranks import CASES, learn, made
from tests.unit.recipes.two_processes import run_two


class Saved(NamedTuple):
    """A checkpoint of two ranks, and what they went on to measure."""

    folder: Path
    results: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return Saved(folder, run_two("tests.unit.recipes.training.ranks", folder))


def test_ranks_go_on_to_the_bit(saved: Saved) -> None:
    for rank in saved.results:
        assert rank["shards"]["version"] == 3
        assert rank["shards"]["resumed"] == rank["shards"]["straight"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_of_small_moments_stay_equal_and_go_on(saved: Saved, case: tuple[str, str]) -> None:
    straight, *others = (weights for rank in saved.results for weights in rank[str(case)])
    assert len(others) == 3
    for name, weight in straight.items():
        assert all(torch.equal(weight, weights[name]) for weights in others)


def test_one_rank_goes_on_from_two(saved: Saved) -> None:
    state = made(9, 1)
    state.load(str(saved.folder))
    assert [learn(state) for _ in range(2)] == pytest.approx(saved.results[0]["shards"]["straight"], rel=1e-6)


def test_every_rank_writes_its_own_shard_once(saved: Saved) -> None:
    files = sorted(path.name for path in (saved.folder / "actor").iterdir())
    assert files == [shard_name(1), shard_name(2)]
    rows = [tensors_in(saved.folder / "actor" / file)[0]["model.0.weight"].shape[0] for file in files]
    assert rows == [4, 3]


def test_torchs_own_reader_reads_them(saved: Saved) -> None:
    hf_storage: Any = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    state = made(9, 1)
    state.load(str(saved.folder))
    theirs = {f"model.{name}": torch.empty_like(weight) for name, weight in state.policy.named_parameters()}
    reader = hf_storage.HuggingFaceStorageReader(str(saved.folder / "actor"))
    dcp.load(theirs, storage_reader=reader, no_dist=True)  # type: ignore[arg-type]
    for name, weight in state.policy.named_parameters():
        assert torch.equal(theirs[f"model.{name}"], weight)


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    """A copy of the actor's folder."""
    return shutil.copytree(saved.folder / "actor", tmp_path / "copied" / "actor")


def rewritten(file: Path, offsets: object) -> None:
    """Write other places of the parts of tensors into a file."""
    tensors, _ = tensors_in(file)
    values = {name: tensor.whole() for name, tensor in tensors.items()}
    written(file, offsets, values)


def written(file: Path, offsets: object, values: dict[str, torch.Tensor]) -> None:
    """Write tensors, each of which is said to begin at the same place."""
    file.unlink(missing_ok=True)
    described = {name: Described(value.dtype, tuple(value.shape)) for name, value in values.items()}
    about = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": offsets} for name in values})}
    with TensorFile(file, described, about) as opened:
        for name, value in values.items():
            opened.write(name, value)


def without_rows(file: Path) -> None:
    file.unlink()
    with TensorFile(file, {}) as _:
        pass


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "lost first": (1, Path.unlink, "it has 1 of the 2 files that were written"),
    "lost last": (2, Path.unlink, "it has 1 of the 2 files that were written"),
    "no tensors": (1, without_rows, "a part of `model.0.weight` is missing"),
    "a pipe": (2, piped, "is a pipe"),
    "cut": (2, lambda file: os.truncate(file, 500), "is not a safetensors file"),
    "empty": (2, lambda file: os.truncate(file, 0), "empty"),
    "text": (2, lambda file: file.write_text("weights of a policy"), "is not a safetensors file"),
    "places as text": (2, lambda file: rewritten(file, "0"), "does not say where"),
    "places below 0": (2, lambda file: rewritten(file, [-1, 0]), "does not say where"),
    "too many places": (2, lambda file: rewritten(file, [0, 0, 0]), "does not say where"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_named(copy: Path, damage: str) -> None:
    number, do, words = DAMAGES[damage]
    do(copy / shard_name(number))
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_weights(copy.parent, made(0, 1).policy)
    assert words in str(caught.value)


def test_a_folder_without_shards_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        ShardReader(tmp_path)


SPLIT = [((at, column), (2, 3)) for at in (0, 2) for column in (0, 3)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (SPLIT, None),
        ([*SPLIT, ((0, 0), (0, 6))], None),
        ([((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))], None),
        (SPLIT[1:], "missing"),
        ([*SPLIT[:3], SPLIT[0]], "overlap"),
        ([*SPLIT[:3], ((1, 2), (2, 3))], "overlap"),
        ([((0, 0), (2, 6)), ((0, 0), (2, 6))], "overlap"),
        ([], "missing"),
    ],
)
def test_parts_cover_a_tensor_once(parts: list[Any], words: str | None) -> None:
    if words is None:
        check_parts("a", (4, 6), parts)
    else:
        with pytest.raises(ValueError, match=words):
            check_parts("a", (4, 6), parts)


def test_tensors_without_elements_or_dimensions_have_parts_too() -> None:
    check_parts("a", (), [((), ())])
    check_parts("a", (0, 3), [])
    check_parts("a", (2**40, 0), [((0, 0), (2**40, 0))])
    with pytest.raises(ValueError, match="missing"):
        check_parts("a", (), [((), ()), ((), ())])
    # A part has two to the power of these dimensions of corners.
    with pytest.raises(ValueError, match="cut along 9 of its dimensions"):
        check_parts("a", (2,) * 9, [(at, (1,) * 9) for at in product((0, 1), repeat=9)])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        pytest.param([(at, (2, 3), torch.float32) for at in (0, 2, 2, 6)], "parts of `a` overlap", id="over a hole"),
        pytest.param([(0, (2,), torch.float32), (2, (2,), torch.int32)], "`a` of a different type", id="types"),
    ],
)
def test_files_whose_parts_do_not_fit_are_refused(tmp_path: Path, parts: list[Any], words: str) -> None:
    for number, (at, shape, dtype) in enumerate(parts, 1):
        written(tmp_path / shard_name(number), [at, 0][: len(shape)], {"a": torch.ones(shape, dtype=dtype)})
    with pytest.raises(ValueError, match=words):
        ShardReader(tmp_path)


def test_an_empty_part_takes_no_place_of_another(tmp_path: Path) -> None:
    written(tmp_path / shard_name(1), [0, 0], {"a": torch.ones(2, 3)})
    written(tmp_path / shard_name(2), [0, 0], {"a": torch.ones(0, 3)})
    read = {"a": torch.zeros(2, 3)}
    dcp.load(read, storage_reader=ShardReader(tmp_path), no_dist=True)  # type: ignore[arg-type]
    assert read["a"].tolist() == [[1, 1, 1]] * 2


def test_a_lost_file_is_missed_whatever_it_held(tmp_path: Path) -> None:
    for number, name in enumerate("ab", 1):
        described = {name: Described(torch.float32, (2,))}
        with TensorFile(tmp_path / shard_name(number), described, about_shards({name: (0,)}, files=2)) as file:
            file.write(name, torch.ones(2))
    assert set(ShardReader(tmp_path).tensors) == {"a", "b"}
    (tmp_path / shard_name(2)).unlink()
    with pytest.raises(ValueError, match="1 of the 2 files"):
        ShardReader(tmp_path)
