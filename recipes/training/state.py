"""The training state of one rank: a policy, its optimizer, and the version of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.checkpoint import ACTOR, load, save
from recipes.training.optimizer import apply_settings, learning_rate_factor, make_optimizer, move_state
from recipes.training.sharding import Sharded, parallelize
from recipes.training.weights import FlatWeights


class TrainingState:
    """A policy, as it is spread over the ranks that train it, with its optimizer.

    Args:
        policy: with equal weights on every rank, on the device that it is trained on. It computes with the memory of
            flat buffers from now on.
        optim: settings of the optimizer.
        fsdp: how weights are spread over ranks.
        rank: this one.
        world_size: number of ranks.
        device: where is computed.
        blocks: parts of the policy whose shards are gathered one at a time.
        methods: those of the policy that training calls besides `forward`.
        is_sent: selects by their names the weights that `whole_weights` returns; None: all.
        component: names the folder in a checkpoint.

    Attributes:
        policy: see above.
        strategy: the way that it is spread over ranks.
        optimizer: of its weights.
        version: counts the training steps that its weights have seen.
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
    ) -> None:
        self.policy = policy
        self.version = 0
        self._optim = optim
        self._component = component
        self._weights = FlatWeights.adopt(policy, is_sent)
        self.strategy = parallelize(policy, rank, world_size, fsdp, device, blocks, methods)
        self.optimizer = make_optimizer(policy, optim)

    def whole_weights(self) -> FlatWeights:
        """Return the current weights, whole. All ranks call it together.

        Without shards it is the memory that the policy computes with.
        """
        if self.strategy.world_size > 1:
            state: dict[str, Tensor] = self.policy.state_dict()
            for name, view in self._weights.views.items():
                view.copy_(self.strategy.whole(state[name]))
        return self._weights

    def apply_settings(self, step: int, last_step: int | None) -> float:
        """Give the optimizer the settings of the file for a training step, and return the learning rate."""
        apply_settings(self.optimizer, self._optim, learning_rate_factor(self._optim, step, last_step))
        return self.optimizer.param_groups[0]["lr"]

    def move(self, device: torch.device) -> None:
        """Move weights and optimizer to a device. Shards stay: `fsdp_config.cpu_offload` moves those."""
        if not isinstance(self.strategy, Sharded):
            self._weights.move(device)
            move_state(self.optimizer, device)

    def save(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; together, with torch.distributed.checkpoint.

        Random numbers are a function of the step: there is no more to write.
        """
        save(Path(folder), self.policy, self.optimizer, self.version, self._component)

    def load(self, folder: str) -> None:
        """Read what `save` wrote, by any number of ranks.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        self.version = load(Path(folder), self.policy, self.optimizer, self._component)
