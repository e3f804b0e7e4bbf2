"""Checkpoints in torch's earlier format: those of its own writer are converted, and no code in them runs."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from recipes.training.conversion.convert import EarlierWeights, convert_checkpoint
from recipes.training.tensor_files import below, read_tensors, write_tensors
from recipes.training.weights import training_state
from rlinf_core.errors import CheckpointError
from rlinf_core.runners.storage.checkpoint import MANIFEST
from tests.payloads import Payload, archived, pickled


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    policy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    sum(weight.float().sum() for weight in policy.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return policy, optimizer


def by_torch(folder: Path, seed: int = 1, **extra: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Write a checkpoint as an earlier rlinf did."""
    policy, optimizer = trained(seed)
    model, state = get_state_dict(policy, optimizer)
    whole = {"model": model, "optimizer": state, "version": 7, **extra}
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder / "actor"), no_dist=True)
    describe(folder)
    return policy, optimizer


def describe(folder: Path, *listed: str) -> None:
    names = listed or {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    content = {"schema": "rlinf.checkpoint/1", "step": 1, "files": dict.fromkeys(names, 1)}
    (folder / MANIFEST).write_text(json.dumps(content))


def converted(folder: Path) -> Path:
    """Return the folder that an earlier checkpoint is converted into."""
    into = folder.parent / "new"
    into.mkdir()
    assert convert_checkpoint(folder, into)
    return into


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return tmp_path / "global_step_1"


def test_a_checkpoint_of_torchs_own_writer_is_resumed(earlier: Path) -> None:
    policy, optimizer = by_torch(earlier)
    other, state = trained(2)
    with pytest.raises(CheckpointError, match="written by an earlier rlinf") as caught:
        training_state.load(earlier, other, state)
    assert "rlinf runs convert RUN" in str(caught.value.help)
    assert training_state.load(converted(earlier), other, state) == 7
    assert all(torch.equal(one, two) for one, two in zip(policy.parameters(), other.parameters(), strict=True))
    mine, theirs = optimizer.state_dict(), state.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, values in mine["state"].items():
        assert all(torch.equal(value, theirs["state"][index][name]) for name, value in values.items())


def test_files_of_torch_save_and_others_go_over(earlier: Path) -> None:
    by_torch(earlier)
    state = {"target": {"a": torch.ones(2)}, "updates": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]}}
    torch.save(state, earlier / "off_policy.pt")
    (earlier / "replay").mkdir()
    (earlier / "replay" / "0.npz").write_text("rows")
    describe(earlier)
    into = converted(earlier)
    assert {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()} == {
        *("actor/shard-00001-model-00001-of-00001.safetensors", "off_policy.safetensors", "replay/0.npz")
    }
    tensors = read_tensors(into / "off_policy.safetensors")
    assert below(tensors, "target")["a"].tolist() == [1, 1]
    assert int(tensors["updates"]) == 3


def test_one_of_this_version_is_left_alone(tmp_path: Path) -> None:
    folder, into = tmp_path / "global_step_1", tmp_path / "new"
    training_state.save(folder, *trained(1), version=1)
    describe(folder)
    into.mkdir()
    assert not convert_checkpoint(folder, into)
    assert list(into.iterdir()) == []


def test_the_index_is_the_one_that_torch_reads(earlier: Path) -> None:
    by_torch(earlier)
    theirs = dcp.FileSystemReader(earlier / "actor").read_metadata().state_dict_metadata
    sizes = {name: tuple(about.size) for name, about in theirs.items() if isinstance(about, dcp.TensorStorageMetadata)}
    assert {name: tensor.shape for name, tensor in EarlierWeights(earlier / "actor").tensors.items()} == sizes


@pytest.mark.security
@pytest.mark.parametrize("content", [pickled, archived])
@pytest.mark.parametrize("name", ["actor/.metadata", "actor/__0_0.distcp", "buffered.pt"])
def test_code_in_place_of_a_file_does_not_run(earlier: Path, name: str, content: Any) -> None:
    by_torch(earlier)
    marker = earlier.parent / "marker"
    (earlier / name).write_bytes(content(marker))
    describe(earlier)
    with pytest.raises(CheckpointError, match="cannot be converted"):
        converted(earlier)
    assert not marker.exists()


def test_torchs_own_reader_runs_it(earlier: Path) -> None:
    """The payload is one: without this the test above could not fail."""
    by_torch(earlier)
    marker = earlier.parent / "marker"
    (earlier / "actor" / ".metadata").write_bytes(pickled(marker))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(earlier / "actor").read_metadata()
    assert marker.exists()


@pytest.mark.security
def test_code_in_a_value_of_a_shard_does_not_run(earlier: Path) -> None:
    marker = earlier.parent / "marker"
    by_torch(earlier, version=Payload(marker))
    with pytest.raises(CheckpointError, match="version"):
        converted(earlier)
    assert not marker.exists()


def test_a_flipped_bit_of_a_shard_is_refused_or_without_effect(earlier: Path) -> None:
    policy, _ = by_torch(earlier)
    shard = earlier / "actor" / "__0_0.distcp"
    whole = shard.read_bytes()
    refused = 0
    for place in range(0, len(whole), 211):
        content = bytearray(whole)
        content[place] ^= 16
        shard.write_bytes(content)
        try:
            weights = EarlierWeights(earlier / "actor")
            read = {name: weights.tensor(f"model.{name}") for name, _ in policy.named_parameters()}
        except ValueError:
            refused += 1
            continue
        assert all(torch.equal(weight, read[name]) for name, weight in policy.named_parameters())
    assert refused


def elsewhere(actor: Path) -> None:
    index = actor / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../x.disc"))


def claiming_too_much(actor: Path) -> None:
    (actor / "__0_0.distcp").write_bytes(b"")
    assert (actor / ".metadata").stat().st_size < 20_000


def of_another_weight(actor: Path, change: Callable[[Any], None]) -> None:
    index = dcp.FileSystemReader(actor).read_metadata()
    change(index.state_dict_metadata["model.0.weight"])
    (actor / ".metadata").write_bytes(pickle.dumps(index))


def overlapping(about: Any) -> None:
    about.chunks[:] = [dataclasses.replace(about.chunks[0], sizes=torch.Size((2, 3)))] * 2


def of_no_tensor(about: Any) -> None:
    about.size = torch.Size((2**61, 2**61, 0))
    about.chunks.clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (elsewhere, "not a shard beside the index"),
        (claiming_too_much, "larger than its part"),
        (partial(of_another_weight, change=overlapping), r"parts of `model.0.weight` overlap"),
        (partial(of_another_weight, change=of_no_tensor), "larger than a tensor can be"),
    ],
    ids=["elsewhere", "too much", "overlap", "no tensor"],
)
def test_an_index_that_does_not_fit_is_refused(earlier: Path, change: Callable[[Path], None], words: str) -> None:
    by_torch(earlier, huge=torch.zeros(1))
    change(earlier / "actor")
    with pytest.raises(CheckpointError, match=words):
        converted(earlier)


@pytest.mark.security
@pytest.mark.parametrize("names", [["off_policy.safetensors", "off_policy.pt"], ["off_policy.safetensors"]])
def test_no_file_outside_of_the_checkpoint_is_touched(earlier: Path, names: list[str]) -> None:
    by_torch(earlier)
    victim = earlier.parent / "victim"
    victim.write_text("theirs")
    torch.save({"a": torch.ones(2)}, earlier / "off_policy.pt")
    (earlier / "off_policy.safetensors").symlink_to(victim)
    describe(earlier, *names, "actor/.metadata")
    with pytest.raises(CheckpointError, match=r"two of its files would become|a link to a file outside"):
        converted(earlier)
    assert (victim.read_text(), victim.stat().st_nlink) == ("theirs", 1)


def test_a_file_of_tensors_takes_no_place_of_another(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(2)})
    assert read_tensors(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, "two values `a.b`"),
        (dict.fromkeys("abcdefgh", torch.ones(1000)), "larger than the file"),
        ({"__metadata__": torch.ones(2)}, "cannot hold a tensor `__metadata__`"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "`a` of torch.complex64"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(earlier: Path, value: Any, words: str) -> None:
    by_torch(earlier)
    torch.save(value, earlier / "off_policy.pt")
    describe(earlier)
    with pytest.raises(CheckpointError, match=words):
        converted(earlier)
    assert not (earlier.parent / "new" / "off_policy.safetensors").exists()


@pytest.mark.parametrize("shape", [[2**70, 0], [2**61, 2**61, 0], [1] * 65])
def test_shapes_of_no_tensor_are_refused(earlier: Path, shape: list[int]) -> None:
    file = earlier.parent / "a.safetensors"
    size = 4 * math.prod(shape)
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(ValueError, match="larger than a tensor can be"):
        read_tensors(file)
