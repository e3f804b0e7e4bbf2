"""The memory that a computation needs, found by running it on torch's meta device: shapes and no memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every operation
from torch.utils._pytree import tree_map_only

from recipes.training.memory.host_memory import LARGEST_KEPT


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
            self._enter(identity, size)
            weakref.finalize(storage, self._leave, identity, size)
        return tensor

    def _enter(self, identity: int, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def _leave(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


class HeapMemory(LiveMemory):
    """Takes a block of the host's memory for each tensor besides, for as long as it lives, as its kernel would.

    With what the backward pass remembers, which is on the host in any case, the blocks lie in the heap as they do where
    the computation has memory, with the same gaps. Nothing is written into them: they have addresses and no pages.

    Attributes:
        mapped: bytes of the tensors that live and are too large for the heap of `keep_freed_memory`: the system maps
            them one by one, and takes them back. They have no blocks here.
        most_mapped: the most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mapped = 0
        self.most_mapped = 0
        self._blocks: dict[int, UntypedStorage] = {}

    def _enter(self, identity: int, size: int) -> None:
        super()._enter(identity, size)
        if size > LARGEST_KEPT:
            self.mapped += size
            self.most_mapped = max(self.most_mapped, self.mapped)
        elif size:
            self._blocks[identity] = UntypedStorage(size, device="cpu")

    def _leave(self, identity: int, size: int) -> None:
        super()._leave(identity, size)
        if self._blocks.pop(identity, None) is None:
            self.mapped -= size
