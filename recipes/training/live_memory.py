"""The memory that a computation needs, found by running it on torch's meta device: shapes and no memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every operation
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within the block, for as long as they live.

    Tensors from outside, such as weights, and views of them are not counted. Nor is what a kernel allocates for itself.

    Args:
        largest: tensors of more bytes are not counted either; None: all are.

    Attributes:
        now: bytes that live.
        peak: the most that lived at a time.
    """

    def __init__(self, largest: int | None = None) -> None:
        super().__init__()
        self._largest = largest
        self.now = 0
        self.peak = 0
        # Storages by identity, which none that is alive shares with another.
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; see `TorchDispatchMode`."""
        given: dict[str, Any] = kwargs or {}
        tree_map_only(Tensor, lambda tensor: self._meet(tensor, 0), (args, given))
        found = func(*args, **given)
        tree_map_only(Tensor, lambda tensor: self._meet(tensor, tensor.untyped_storage().nbytes()), found)
        return found

    def _meet(self, tensor: Tensor, size: int) -> Tensor:
        storage = tensor.untyped_storage()
        identity = id(storage)
        if identity not in self._known:
            size = 0 if self._largest is not None and size > self._largest else size
            self._known.add(identity)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, identity, size)
        return tensor

    def _leave(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size
