"""Weights that travel as a few buffers are those that the policy computes with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.training.optim.optimizer import move_state
from recipes.training.weights.weight_sync import FirstPiece, FlatWeights, piece_messages
from rlinf_core import RLinfError


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
