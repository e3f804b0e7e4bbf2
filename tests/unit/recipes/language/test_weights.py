"""Weights on their way to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.language.fingerprint import fingerprint
from recipes.language.weights import WeightUpdate
from recipes.training.weights import FlatWeights
from rlinf_core import RLinfError


class Receiver:
    """Stands for an engine: keeps what it is given, one number of it changed on request."""

    def __init__(self, changed: str | None = None) -> None:
        self.changed = changed
        self.held: dict[str, Tensor] = {}

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool) -> str:
        self.held = {name: tensor.clone() for name, tensor in tensors}
        if self.changed is not None:
            self.held[self.changed].view(-1)[-1] += 1
        return fingerprint(self.held.items())


def update() -> WeightUpdate:
    torch.manual_seed(0)
    named = {
        "model.a": torch.randn(70, 90),
        "model.b": torch.randn(5).to(torch.bfloat16),
        "model.c": torch.randn(()),
    }
    return WeightUpdate.of(FlatWeights(named), 7, prefix="model.")


def test_an_engine_gets_every_tensor_by_its_name() -> None:
    receiver: Any = Receiver()
    sent = update()
    sent.apply(receiver)
    assert {name: tuple(each.shape) for name, each in receiver.held.items()} == {"a": (70, 90), "b": (5,), "c": ()}
    for name, tensor in sent.tensors():
        assert torch.equal(receiver.held[name], tensor)


@pytest.mark.parametrize("changed", ["a", "b", "c"])
def test_an_engine_with_other_weights_is_an_error(changed: str) -> None:
    receiver: Any = Receiver(changed)
    with pytest.raises(RLinfError, match="weights of version 7 are not the actor's"):
        update().apply(receiver)
