"""Weights on disk: what was written is read, and what cannot be is one error that names the cause."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from recipes.training.weights import training_state
from recipes.training.weights.shard_files import shard_name
from rlinf_core.errors import CheckpointError

SHARD = shard_name(1)


def trained(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(width)
    policy = torch.nn.Linear(width, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    policy(torch.ones(width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return policy, optimizer


def test_weights_that_no_loss_has_reached_have_a_state_too(tmp_path: Path) -> None:
    policy, optimizer = trained(3)
    idle = torch.nn.Linear(3, 1)
    both = torch.nn.ModuleList((policy, idle))
    optimizer.add_param_group({"params": list(idle.parameters())})
    training_state.save(tmp_path, both, optimizer, version=1)
    other = torch.nn.ModuleList((torch.nn.Linear(3, 2), torch.nn.Linear(3, 1)))
    state = torch.optim.Adam(other[0].parameters())
    state.add_param_group({"params": list(other[1].parameters())})
    training_state.load(tmp_path, other, state)
    steps = [float(item["step"]) for item in state.state_dict()["state"].values()]
    assert steps == [1, 1, 0, 0]


def test_group_without_weights_keeps_its_settings(tmp_path: Path) -> None:
    """As that of critics, all of whose weights are in the group of values."""

    def with_empty_group(policy: torch.nn.Module) -> torch.optim.Optimizer:
        groups: list[dict[str, list[torch.nn.Parameter]]] = [{"params": []}, {"params": list(policy.parameters())}]
        return torch.optim.AdamW(groups, lr=0.1, fused=True)

    policy, _ = trained(3)
    optimizer = with_empty_group(policy)
    policy(torch.ones(3)).sum().backward()
    optimizer.step()
    training_state.save(tmp_path, policy, optimizer, version=1)
    other, _ = trained(3)
    state = with_empty_group(other)
    training_state.load(tmp_path, other, state)
    assert state.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    # A run that went on from a checkpoint saves the very bytes of one that nothing happened to.
    training_state.save(tmp_path / "again", other, state, version=1)
    first, again = (folder / training_state.ACTOR / SHARD for folder in (tmp_path, tmp_path / "again"))
    assert first.read_bytes() == again.read_bytes()


def test_what_cannot_be_written_names_its_cause(tmp_path: Path) -> None:
    (tmp_path / training_state.ACTOR).write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        training_state.save(tmp_path, *trained(3), version=1)
    assert "File exists" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_disk_that_is_full_is_named_with_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("recipes.training.tensor_files.TensorFile.write", full)
    with pytest.raises(CheckpointError, match="weights cannot be written") as caught:
        training_state.save(tmp_path, *trained(3), version=1)
    words = r"No space left on device: the disk has [\d.]+ (MiB )?of \d+ [MG]iB free"
    assert re.fullmatch(words, caught.value.why or "")


@pytest.mark.parametrize("there", [False, True])
def test_what_is_missing_or_of_another_model_names_its_cause(tmp_path: Path, there: bool) -> None:
    if there:
        training_state.save(tmp_path, *trained(4), version=1)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        training_state.load(tmp_path, *trained(3))
    assert "Traceback" not in str(caught.value)
    assert ("size" if there else "copy the checkpoint again") in str(caught.value)
    assert ("copy" in str(caught.value)) != there


def test_untrained_weights_are_written_where_nothing_has_them(tmp_path: Path) -> None:
    def half_trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        both = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        both[0].requires_grad_(False)
        return both, torch.optim.Adam(both[1].parameters())

    policy, optimizer = half_trained(0)
    for frozen in (True, False):
        folder = tmp_path / str(frozen)
        training_state.save(folder, policy, optimizer, version=1, frozen=frozen)
        other, _ = half_trained(1)
        training_state.load_weights(folder, other)
        resumed, state = half_trained(2)
        assert training_state.load(folder, resumed, state) == 1
        for read in (other, resumed):
            same = {name: torch.equal(weight, policy.get_parameter(name)) for name, weight in read.named_parameters()}
            assert same == {"0.weight": frozen, "0.bias": frozen, "1.weight": True, "1.bias": True}


def test_weights_without_adapters_are_read_beneath_new_ones(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    class Policy(torch.nn.Module):
        def __init__(self, seed: int, *, adapted: bool) -> None:
            super().__init__()
            torch.manual_seed(seed)
            body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
            self.head = torch.nn.Linear(2, 1)
            self.body: torch.nn.Module = (
                get_peft_model(body, LoraConfig(r=2, target_modules=["0"])) if adapted else body  # type: ignore[arg-type]
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(inputs))

    plain = Policy(0, adapted=False)
    training_state.save(tmp_path / "plain", plain, torch.optim.Adam(plain.parameters()), version=1)
    adapted = Policy(1, adapted=True)
    training_state.load_weights(tmp_path / "plain", adapted)
    inputs = torch.ones(5, 3)
    assert torch.equal(adapted(inputs), plain(inputs))  # adapters begin with nothing
    training_state.save(tmp_path / "adapted", adapted, torch.optim.Adam(adapted.parameters()), version=2, frozen=True)
    again = Policy(2, adapted=True)
    training_state.load_weights(tmp_path / "adapted", again)
    assert all(torch.equal(weight, adapted.state_dict()[name]) for name, weight in again.state_dict().items())
    # What was trained with adapters is not read by a model that has none.
    with pytest.raises(CheckpointError) as caught:
        training_state.load_weights(tmp_path / "adapted", Policy(3, adapted=False))
    assert "the checkpoint has no weight `body.0" in str(caught.value.why)


def test_other_kinds_of_numbers_are_not_converted(tmp_path: Path) -> None:
    class Counted(torch.nn.Linear):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__(2, 1)
            self.register_buffer("count", torch.ones(1, dtype=dtype))

    def save(dtype: torch.dtype) -> Path:
        policy = Counted(dtype)
        training_state.save(tmp_path / str(dtype), policy, torch.optim.Adam(policy.parameters()), version=1)
        return tmp_path / str(dtype)

    training_state.load_weights(save(torch.float64), Counted(torch.float32))
    for stored, own in ((torch.int64, torch.float32), (torch.float32, torch.bool)):
        with pytest.raises(CheckpointError, match=rf"`model.count` is of {stored}, the model's is of {own}"):
            training_state.load_weights(save(stored), Counted(own))
