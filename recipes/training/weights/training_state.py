"""The training state of one rank: a policy, its optimizer, and the version of its weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.optimizer import apply_settings, learning_rate_factor, make_optimizer, move_state
from recipes.training.sharding import is_sharded, parallelize
from recipes.training.weight_sources import WeightSource
from recipes.training.weights.state_checkpoint import ACTOR, load, save
from recipes.training.weights.weight_sync import FlatWeights, GatheredWeights, SentWeights, own_weights

_HOST: Final = torch.device("cpu")


class TrainingState:
    """A sharded policy with its optimizer.

    Args:
        policy: the policy, on its training device, with equal weights on every rank. Without shards its weights move
            into flat buffers.
        optim: settings of the optimizer.
        fsdp: how weights are distributed over ranks.
        rank: the rank of this process.
        world_size: number of ranks.
        device: the device that computes.
        blocks: parts of the policy whose shards are gathered one at a time.
        methods: methods of the policy that training calls besides `forward`.
        is_sent: selects by name the weights that `sent_weights` returns; None: all.
        component: names the folder in a checkpoint.
        compute_dtype: the type that layers compute in, with copies of the weights, and that `sent_weights` returns; see
            `parallelize`. None: the type of the weights.
        exact: the `blocks` that compute in the type of their weights.
        sent_types: types of the weights that `sent_weights` returns, by name; None: `compute_dtype`, or their own.
        saves_frozen: see `recipes.training.weights.state_checkpoint.save`.
        initial: see `parallelize`.

    Attributes:
        policy: the policy.
        strategy: how the policy is distributed over ranks.
        optimizer: the optimizer of the policy's weights.
        version: the number of training steps that the weights have seen.
        written: fingerprints of the weights in the model folder that this rank wrote last, by name.
    """

    def __init__(
        self,
        policy: nn.Module,
        optim: OptimConfig,
        fsdp: FsdpConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        blocks: Sequence[nn.Module] = (),
        methods: Sequence[str] = (),
        is_sent: Callable[[str], bool] | None = None,
        component: str = ACTOR,
        compute_dtype: torch.dtype | None = None,
        exact: Sequence[nn.Module] = (),
        sent_types: Mapping[str, torch.dtype] | None = None,
        saves_frozen: bool = False,
        initial: WeightSource | None = None,
    ) -> None:
        self.policy = policy
        self._saves_frozen = saves_frozen
        self.version = 0
        self.written: Mapping[str, str] = {}
        self._optim = optim
        self._component = component
        self._device = self._place = device
        # Without shards, or if weights are sent in their own types, the policy's own memory is sent.
        gathers = is_sharded(fsdp, world_size, compute_dtype) or sent_types is not None
        self._flat = None if gathers else FlatWeights.adopt(policy, is_sent)
        self.strategy = parallelize(
            policy,
            rank,
            world_size,
            fsdp,
            device,
            blocks,
            methods,
            compute_dtype=compute_dtype,
            exact=exact,
            initial=initial,
        )
        self.optimizer = make_optimizer(policy, optim)
        self._sent = self._flat or GatheredWeights(
            lambda: own_weights(policy, is_sent), sent_types or compute_dtype, self.strategy.full_tensor, self.onloaded
        )

    def sent_weights(self) -> SentWeights:
        """Return the current weights for sending, gathered piece by piece during iteration.

        Without shards, and if weights are sent in their own types, the pieces share the policy's memory.
        """
        return self._sent

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all full weights by name, in their own types, one at a time. Collective over all ranks.

        Only rank 0 gets the values, on the host; they may share memory with the weights. On other ranks the tensors are
        empty.
        """
        with self.onloaded():
            state: dict[str, Tensor] = self.policy.state_dict()
            for name, value in state.items():
                full = self.strategy.full_tensor(value)
                yield name, full.to(_HOST) if self.strategy.rank == 0 else full.new_empty(0)
                del full

    def apply_settings(self, step: int, last_step: int | None) -> float:
        """Apply the optimizer settings of a training step, and return the learning rate."""
        apply_settings(self.optimizer, self._optim, learning_rate_factor(self._optim, step, last_step))
        return self.optimizer.param_groups[0]["lr"]

    def onload(self) -> None:
        """Move weights and optimizer back to their training device."""
        self._move(self._device)

    def offload(self, place: torch.device = _HOST) -> None:
        """Free device memory until `onload`: weights and optimizer move to the host, gradients are dropped.

        Nothing is lost, since every optimizer step begins without gradients. Checkpoints and whole weights remain
        available meanwhile.

        Args:
            place: the device for weights and optimizer.
        """
        self.optimizer.zero_grad()
        self._move(place)
        release_memory(self._device)

    @contextmanager
    def onloaded(self) -> Generator[None, None, None]:
        """Have weights and optimizer on their device in this block, and move them back afterwards."""
        place = self._place
        self._move(self._device)
        try:
            yield
        finally:
            self._move(place)

    def _move(self, place: torch.device) -> None:
        if place == self._place:
            return
        if self._flat is None:
            self.policy.to(place)
        else:
            self._flat.move(place)
        move_state(self.optimizer, place)
        self._place = place

    def save(self, folder: str) -> None:
        """Write weights and optimizer into a folder that all ranks share. Collective, with
        torch.distributed.checkpoint.

        Random numbers are a function of the step, so that no generator state is written.
        """
        with self.onloaded():
            save(
                Path(folder),
                self.policy,
                self.optimizer,
                self.version,
                self._component,
                frozen=self._saves_frozen,
            )

    def load(self, folder: str) -> None:
        """Read the state that `save` wrote, with any number of ranks.

        Raises:
            CheckpointError: the state cannot be read, or is of another model.
        """
        with self.onloaded():
            self.version = load(Path(folder), self.policy, self.optimizer, self._component)


def release_memory(device: torch.device) -> None:
    """Release the unused cached memory of a device to other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
