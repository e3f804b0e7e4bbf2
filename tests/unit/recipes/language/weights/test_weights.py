"""Weights on their way to an engine, and their fingerprints."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.language.models.fingerprint import Fingerprint, fingerprint
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 5, 8192, 40_001])
def test_it_depends_on_contents_and_not_on_where_they_lie(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(size) % 251).to(dtype)
    moved = torch.cat((torch.zeros(3).to(dtype), values))[3:]
    assert fingerprint([("a", values)]) == fingerprint([("a", moved)])
    for place in {0, size // 2, size - 1} if size else set[int]():
        torn = values.clone()
        torn[place] += 1
        assert fingerprint([("a", torn)]) != fingerprint([("a", values)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 8193, 300_001])
def test_a_copy_on_the_way_keeps_the_fingerprint(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(size) % 251).to(dtype)
    around = torch.zeros(size + 6, dtype=dtype)
    digest = Fingerprint()
    digest.add("a", values, copy_to=around[3:-3])
    assert digest.text() == fingerprint([("a", values)])
    assert torch.equal(around[3:-3], values)
    assert not around[:3].any()
    assert not around[-3:].any()


@pytest.mark.parametrize("target", [torch.empty(5), torch.empty(6, dtype=torch.float64), torch.empty(12)[::2]])
def test_memory_of_another_form_is_never_written(target: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="`a` cannot be copied"):
        Fingerprint().add("a", torch.arange(6.0), copy_to=target)


def test_fingerprint_depends_on_names_shapes_and_types() -> None:
    one, two = torch.arange(6.0), torch.arange(4.0)
    result = fingerprint([("a", one), ("b", two)])
    assert result == fingerprint([("b", two), ("a", one)])
    others = [
        [("a", two), ("b", one)],
        [("a", one), ("c", two)],
        [("a", one.view(2, 3)), ("b", two)],
        [("a", one.double()), ("b", two)],
        [("a", one)],
    ]
    assert result not in {fingerprint(other) for other in others}
