"""Checkpoints in torch's format as data: those of its own writer are read, and no code in them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from recipes.training.reading.checkpoints import read_index
from recipes.training.state import state_checkpoint
from rlinf_core.errors import CheckpointError
from tests.payloads import Payload, archived, pickled


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    policy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    sum(weight.float().sum() for weight in policy.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return policy, optimizer


def by_torch(folder: Path, seed: int = 1, **extra: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Write a checkpoint as versions before this reader did."""
    policy, optimizer = trained(seed)
    model, state = get_state_dict(policy, optimizer)
    whole = {"model": model, "optimizer": state, "version": 7, **extra}
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder / "actor"), no_dist=True)
    return policy, optimizer


def test_a_checkpoint_of_torchs_own_writer_is_read(tmp_path: Path) -> None:
    policy, optimizer = by_torch(tmp_path)
    other, state = trained(2)
    assert state_checkpoint.load(tmp_path, other, state) == 7
    assert all(torch.equal(one, two) for one, two in zip(policy.parameters(), other.parameters(), strict=True))
    mine, theirs = optimizer.state_dict(), state.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, values in mine["state"].items():
        assert all(torch.equal(value, theirs["state"][index][name]) for name, value in values.items())


def test_the_index_is_the_one_that_torch_reads(tmp_path: Path) -> None:
    by_torch(tmp_path)
    theirs = dcp.FileSystemReader(tmp_path / "actor").read_metadata()
    mine = read_index(tmp_path / "actor")
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.storage_data == theirs.storage_data


@pytest.mark.parametrize("content", [pickled, archived])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_code_in_place_of_a_file_does_not_run(tmp_path: Path, name: str, content: Any) -> None:
    by_torch(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "actor" / name).write_bytes(content(marker))
    for read in (lambda: state_checkpoint.load(tmp_path, *trained(2)), lambda: _weights(tmp_path)):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read()
    assert not marker.exists()


def test_torchs_own_reader_runs_it(tmp_path: Path) -> None:
    """The payload is one: without this the test above could not fail."""
    by_torch(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "actor" / ".metadata").write_bytes(pickled(marker))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(tmp_path / "actor").read_metadata()
    assert marker.exists()


def test_code_in_a_value_of_a_shard_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    by_torch(tmp_path, version=Payload(marker))
    with pytest.raises(CheckpointError, match="version"):
        state_checkpoint.load(tmp_path, *trained(2))
    assert not marker.exists()


def test_a_flipped_bit_of_a_shard_is_refused_or_without_effect(tmp_path: Path) -> None:
    policy, _ = by_torch(tmp_path)
    shard = tmp_path / "actor" / "__0_0.distcp"
    whole = shard.read_bytes()
    refused = 0
    for place in range(0, len(whole), 211):
        content = bytearray(whole)
        content[place] ^= 16
        shard.write_bytes(content)
        other, state = trained(2)
        try:
            state_checkpoint.load(tmp_path, other, state)
        except CheckpointError:
            refused += 1
            continue
        assert all(torch.equal(one, two) for one, two in zip(policy.parameters(), other.parameters(), strict=True))
    assert refused


def test_a_shard_elsewhere_is_refused(tmp_path: Path) -> None:
    by_torch(tmp_path)
    index = tmp_path / "actor" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../x.disc"))
    with pytest.raises(CheckpointError, match="not a shard beside the index"):
        state_checkpoint.load(tmp_path, *trained(2))


def _weights(folder: Path) -> None:
    state_checkpoint.load_weights(folder, trained(2)[0])
