"""Weights on their way to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.language.models.fingerprint import fingerprint
from recipes.language.weights.weight_transfer import IncomingWeights, messages
from recipes.training.weights.weight_sync import FlatWeights
from rlinf_core import RLinfError
from tests.unit.recipes.language.in_threads import as_received


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


NAMED = {
    "model.a": torch.linspace(-1, 1, 70 * 90).view(70, 90),
    "model.b": torch.arange(5).to(torch.bfloat16),
    "model.c": torch.tensor(0.5),
    "model.d": torch.ones(3),
}


class Mail:
    """Messages on their way; those after the first `there` have not arrived yet."""

    def __init__(self, sent: Iterable[Any], there: int | None = None) -> None:
        self.sent = [as_received(message) for message in sent]
        self.there = len(self.sent) if there is None else there
        self.asked = 0

    def receive(self) -> Any:
        number, self.asked = self.asked, self.asked + 1
        return SimpleNamespace(done=lambda: number < self.there, wait=lambda: self.sent[number])


def mail(**changes: int) -> Mail:
    return Mail(messages(FlatWeights(NAMED), 7, prefix="model."), **changes)


def test_an_engine_gets_every_tensor_by_its_name() -> None:
    receiver: Any = Receiver()
    IncomingWeights(mail().receive).wait().apply(receiver)
    assert {name: tuple(value.shape) for name, value in receiver.held.items()} == {
        "a": (70, 90),
        "b": (5,),
        "c": (),
        "d": (3,),
    }
    for name, tensor in NAMED.items():
        assert torch.equal(receiver.held[name.removeprefix("model.")], tensor)


def test_weights_travel_in_pieces_that_hold_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.training.weights.weight_sync.PIECE_BYTES", 100)
    sent = mail().sent
    assert [[place.name for place in piece] for piece in sent[0].pieces] == [["b"], ["a"], ["c", "d"]]
    assert sum(piece.nbytes for piece in sent[1:-1]) < 2 * sum(item.nbytes for item in NAMED.values())
    receiver: Any = Receiver()
    IncomingWeights(Mail(sent).receive).wait().apply(receiver)
    assert all(torch.equal(receiver.held[name.removeprefix("model.")], tensor) for name, tensor in NAMED.items())


def test_weights_have_arrived_when_their_last_message_has() -> None:
    few = mail(there=0)
    incoming = IncomingWeights(few.receive)
    assert not incoming.done()
    assert few.asked == 1, "what follows the header is not known before it"
    few.there = len(few.sent) - 1
    assert not incoming.done()
    few.there += 1
    assert incoming.done()
    assert few.asked == len(few.sent)


def test_weights_that_leave_without_a_copy_have_a_fingerprint() -> None:
    sent = list(messages(FlatWeights(NAMED), 7))
    copied = Mail(messages(FlatWeights(NAMED), 7)).sent
    assert sent[-1] == copied[-1] == fingerprint(NAMED.items())


@pytest.mark.parametrize("changed", ["a", "b", "c"])
def test_an_engine_with_other_weights_is_an_error(changed: str) -> None:
    receiver: Any = Receiver(changed)
    with pytest.raises(RLinfError, match="weights of version 7 differ from the actor's"):
        IncomingWeights(mail().receive).wait().apply(receiver)
