"""Weights on their way from actors to engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from recipes.language.engines.base import Engine
from recipes.language.fingerprint import fingerprint
from recipes.training.weights import FlatWeights
from rlinf_core import RLinfError


class Place(NamedTuple):
    """The place of a tensor in flat buffers."""

    name: str
    buffer: int
    offset: int
    shape: tuple[int, ...]


class WeightUpdate(NamedTuple):
    """Weights of a version, as a few contiguous buffers.

    Attributes:
        version: counts optimizer steps of training steps.
        places: where each tensor lies.
        buffers: one tensor for each dtype.
        fingerprint: of the tensors, by the sender.
        adapter_only: whether they are those of a LoRA adapter.
    """

    version: int
    places: tuple[Place, ...]
    buffers: list[Tensor]
    fingerprint: str
    adapter_only: bool = False

    @classmethod
    def of(cls, weights: FlatWeights, version: int, *, prefix: str = "", adapter_only: bool = False) -> WeightUpdate:
        """Return an update that shares the memory of `weights`; `prefix` is taken off the names."""
        named = {name.removeprefix(prefix): view for name, view in weights.views.items()}
        places = places_of(named, weights.buffers)
        return cls(version, places, weights.buffers, fingerprint(named.items()), adapter_only)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor by name; they share memory with the buffers."""
        for each in self.places:
            count = 1
            for size in each.shape:
                count *= size
            yield each.name, self.buffers[each.buffer][each.offset : each.offset + count].view(each.shape)

    def apply(self, engine: Engine) -> None:
        """Load the weights into an engine.

        Raises:
            RLinfError: the engine's fingerprint is another one.
        """
        found = engine.load_weights(self.tensors(), self.version, adapter_only=self.adapter_only)
        if found != self.fingerprint:
            raise RLinfError(
                f"the engine's weights of version {self.version} are not the actor's",
                why=f"their fingerprint is {found}, that of the actor's {self.fingerprint}",
                help="model and precision of actor and rollout must be the same",
            )


def places_of(views: Mapping[str, Tensor], buffers: list[Tensor]) -> tuple[Place, ...]:
    """Return where views of flat buffers lie in them."""
    number = {buffer.dtype: index for index, buffer in enumerate(buffers)}
    return tuple(
        Place(name, number[view.dtype], int(view.storage_offset()), tuple(view.shape)) for name, view in views.items()
    )
