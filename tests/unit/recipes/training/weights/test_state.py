"""A policy, its optimizer and the weights that it sends: they leave a device for the host, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.optimizer import move_state
from recipes.training.weights.training_state import TrainingState
from recipes.training.weights.weight_sync import FirstPiece, FlatWeights, piece_messages
from rlinf_core import RLinfError

BOTH = pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
HOST, AWAY = torch.device("cpu"), torch.device("meta")


def state(compute_dtype: torch.dtype | None, device: torch.device = HOST) -> TrainingState:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(device)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "device": device, "compute_dtype": compute_dtype}
    return TrainingState(policy, OptimConfig(lr=0.1), FsdpConfig(), **options)


def learn(made: TrainingState) -> None:
    made.optimizer.zero_grad()
    buffer = next(made.sent_weights().tensors())
    made.strategy.module(torch.ones(2, 3, dtype=buffer.dtype, device=buffer.device)).float().sum().backward()
    made.optimizer.step()


def tensors(made: TrainingState) -> list[Tensor]:
    """Return all memory of a state that has learned."""
    results: list[Tensor] = [*made.policy.parameters()]
    flat = made._flat  # pyright: ignore[reportPrivateUsage]
    results += [] if flat is None else flat.buffers
    results += [weight.grad for weight in made.policy.parameters() if weight.grad is not None]
    results += [value for values in made.optimizer.state.values() for value in values.values()]
    return [result.to_local() if isinstance(result, DTensor) else result for result in results]


@BOTH
def test_nothing_stays_on_the_device(monkeypatch: pytest.MonkeyPatch, compute_dtype: torch.dtype | None) -> None:
    """A device without memory stands for the host, and the processor's memory for the accelerator's."""
    made = state(compute_dtype)
    # A weight of the processor cannot be given such memory in place.
    flat = made._flat  # pyright: ignore[reportPrivateUsage]
    swap = {} if flat is None else {name: name.split(".") for name in flat.views}
    monkeypatch.setattr(
        FlatWeights,
        "_give",
        lambda self: [
            setattr(made.policy.get_submodule(where), name, nn.Parameter(self.views[f"{where}.{name}"]))
            for where, name in swap.values()
        ],
    )
    learn(made)
    before = tensors(made)
    # Weights, the buffer that they are in where they are not shards, gradients, two moments and a count of each.
    assert len(before) == 4 + len(swap) // 4 + 4 + 12
    assert {item.device for item in before} == {HOST}
    made.offload(AWAY)
    after = tensors(made)
    assert len(after) == 4 + len(swap) // 4 + 12
    assert {item.device for item in after} == {AWAY}


@BOTH
def test_what_is_asked_while_it_rests_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute_dtype: torch.dtype | None
) -> None:
    made = state(compute_dtype)
    learn(made)
    places: list[torch.device] = []

    def move(self: TrainingState, place: torch.device) -> None:
        if place != self._place:  # pyright: ignore[reportPrivateUsage]
            places.append(place)
            self._place = place  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(TrainingState, "_move", move)
    made.offload(AWAY)
    folder = str(tmp_path)
    for ask in (lambda: made.save(folder), lambda: made.load(folder), lambda: dict(made.whole_tensors())):
        ask()
        assert places[-2:] == [HOST, AWAY]
    count = len(places)
    list(made.sent_weights().tensors())
    # Weights are gathered from shards on the device; without shards they are sent from where they are.
    assert len(places) == count + (2 if compute_dtype else 0)
    made.onload()
    assert places[-1] == HOST


@BOTH
def test_a_rest_changes_nothing_of_what_is_learned(compute_dtype: torch.dtype | None) -> None:
    straight, offloaded = state(compute_dtype), state(compute_dtype)
    for _ in range(3):
        learn(straight)
        learn(offloaded)
        offloaded.offload()
        offloaded.onload()
    expected = dict(straight.whole_tensors())
    assert all(torch.equal(value, expected[name]) for name, value in offloaded.whole_tensors())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@BOTH
def test_an_accelerator_is_left_and_come_back_to(compute_dtype: torch.dtype | None) -> None:
    device = torch.device("cuda", 0)
    straight, offloaded = state(compute_dtype, device), state(compute_dtype, device)
    for _ in range(3):
        learn(straight)
        offloaded.onload()
        learn(offloaded)
        offloaded.offload()
        assert {tensor.device.type for tensor in tensors(offloaded)} == {"cpu"}
    expected = dict(straight.whole_tensors())
    assert all(torch.equal(value, expected[name]) for name, value in offloaded.whole_tensors())


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def test_a_module_computes_with_the_buffers() -> None:
    one, other = network(0), network(1)
    here, there = FlatWeights.adopt(one), FlatWeights.adopt(other)
    inputs = torch.randn(4, 3)
    assert not torch.equal(one(inputs), other(inputs))
    for mine, theirs in zip(here.buffers, there.buffers, strict=True):
        theirs.copy_(mine)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    one.eval()
    other.eval()
    torch.testing.assert_close(one(inputs), other(inputs))


def test_training_changes_the_buffers() -> None:
    module = network(0)
    weights = FlatWeights.adopt(module)
    before = weights.buffers[0].clone()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(weights.buffers[0], before)
    assert torch.equal(weights.views["0.weight"], module[0].weight)


def test_every_dtype_has_a_buffer_and_every_view_is_aligned() -> None:
    weights = FlatWeights({"a": torch.ones(3), "b": torch.ones(5, dtype=torch.int64), "c": torch.ones(2, 2)})
    assert [buffer.dtype for buffer in weights.buffers] == [torch.float32, torch.int64]
    assert all(
        view.data_ptr() % 64 == weights.buffers[0].data_ptr() % 64 for view in (weights.views["a"], weights.views["c"])
    )
    assert weights.nbytes == sum(buffer.nbytes for buffer in weights.buffers)


def test_shared_weights_stay_shared() -> None:
    module = nn.Module()
    module.one = nn.Linear(2, 2)
    module.other = module.one
    weights = FlatWeights.adopt(module)
    assert set(weights.views) == {"one.weight", "one.bias"}
    weights.buffers[0].zero_()
    assert module.other.weight.sum() == 0


class Counting(nn.Linear):
    """A layer that replaces its buffer instead of changing it."""

    def __init__(self, size: int) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(input)
        return super().forward(input) + self.seen.sum()


def arrive(theirs: FlatWeights, mine: FlatWeights) -> None:
    first, *others = piece_messages(theirs, None)
    assert isinstance(first, FirstPiece)
    mine.load(first, iter(others))  # pyright: ignore[reportArgumentType]


def test_buffers_that_a_policy_replaces_are_sent() -> None:
    one, other = Counting(1), Counting(1)
    here, there = FlatWeights.adopt(one), FlatWeights.adopt(other)
    inputs = torch.randn(4, 3)
    one(inputs), one(inputs), other(inputs)
    arrive(here, there)
    assert other.seen.item() == 8
    assert torch.equal(other(inputs), one(inputs))
    other.seen = torch.ones(2)
    with pytest.raises(RLinfError, match="`seen` is"):
        arrive(here, there)


def test_what_is_where_it_should_be_is_not_moved() -> None:
    weights = FlatWeights.adopt(network(0))
    before = weights.buffers[0]
    weights.move(torch.device("cpu"))
    assert weights.buffers[0] is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_weights_come_back_from_the_host() -> None:
    device = torch.device("cuda", 0)
    module = network(0).to(device)
    weights = FlatWeights.adopt(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    inputs = torch.randn(4, 3, device=device)
    module(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    for place in (torch.device("cpu"), device):
        weights.move(place)
        move_state(optimizer, place)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    module(inputs).sum().backward()
    optimizer.step()
    assert torch.equal(weights.views["0.weight"], module[0].weight)
