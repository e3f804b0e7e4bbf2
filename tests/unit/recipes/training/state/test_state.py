"""A policy and its optimizer leave a device for the host, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.state.training_state import TrainingState
from recipes.training.weights.weight_sync import FlatWeights

HOST, AWAY = torch.device("cpu"), torch.device("meta")


def state(compute_dtype: torch.dtype | None, device: torch.device = HOST) -> TrainingState:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(device)
    return TrainingState(
        policy,
        OptimConfig(lr=0.1),
        FsdpConfig(),
        rank=0,
        world_size=1,
        device=device,
        compute_dtype=compute_dtype,
    )


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


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
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


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
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
    for ask in (
        lambda: made.save(str(tmp_path)),
        lambda: made.load(str(tmp_path)),
        lambda: dict(made.whole_tensors()),
    ):
        ask()
        assert places[-2:] == [HOST, AWAY]
    count = len(places)
    list(made.sent_weights().tensors())
    # Weights are gathered from shards on the device; without shards they are sent from where they are.
    assert len(places) == count + (2 if compute_dtype else 0)
    made.onload()
    assert places[-1] == HOST


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
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
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
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
