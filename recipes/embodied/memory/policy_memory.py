"""Memory of a policy, found on torch's meta device: its weights, and what it takes to act and to learn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.config import PolicyActorConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.learning.policy_precision import acting_type
from recipes.embodied.memory.meta_attention import fuse_attention
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs
from recipes.embodied.models.heads import OrthogonalLinear
from recipes.embodied.models.registry import make_model
from recipes.training.memory.host_memory import LARGEST_KEPT
from recipes.training.memory.live_memory import LiveMemory


class PolicyMemory:
    """Sizes of a policy for an environment, in bytes; the policy itself has no memory.

    Args:
        actor: the section `actor`.
        spec: of the environment.
        imitates: it learns by the loss of demonstrations, not by reinforcement.
        acts: it is a rollout worker's, whose weights are of another type than those that are trained.

    Attributes:
        weights: all of them, as they are kept.
        trained: those that are trained.
        making: the most that there is while it is made and its weights become one buffer.
        notes: what is not known.
    """

    def __init__(self, actor: PolicyActorConfig, spec: EnvSpec, *, imitates: bool = False, acts: bool = False) -> None:
        section = actor.model
        folder = section.model_path
        self.notes: tuple[str, ...] = ()
        if folder is not None and not os.path.isdir(folder):
            self.notes = (f"`{folder}` is not on this machine: sizes are those of a policy without a folder",)
            section = section.model_copy(update={"model_path": None})
        with torch.device("meta"):
            policy = make_model(section, spec)
        made = _weights(policy)
        factors = [_factors(each) for each in policy.modules() if isinstance(each, OrthogonalLinear)]
        policy = policy.to(acting_type(actor) if acts else torch.float32)
        fuse_attention(policy)
        if actor.fsdp_config.gradient_checkpointing:
            policy.checkpoint_activations()
        self.weights = _weights(policy)
        self.trained = _bytes(each for each in policy.parameters() if each.requires_grad)
        self.making = max(made + max(factors, default=0), 2 * self.weights)
        self._chunk = section.num_action_chunks
        self._policy = policy
        self._imitates = imitates
        self._example = example_inputs(policy, spec, 1, "meta")

    def of_one_actor(self, strategy: str, count: int) -> tuple[int, int]:
        """Return the weights, and the trained ones, that one of so many actors holds; `strategy` may shard them."""
        shards = 1 if strategy == "no_shard" else count
        return self.weights // shards, self.trained // shards

    @cached_property
    def inputs(self) -> int:
        """The inputs of one observation."""
        return _bytes(self._example.values())

    @cached_property
    def sample(self) -> int:
        """One step of a rollout: inputs, actions, log-probabilities, rewards, flags, values."""
        output = self._policy.act(self._inputs(1))
        values = 0 if output.values is None else output.values.numel()
        return self.inputs + _bytes([output.actions, output.logprobs]) + 4 * self._chunk + 3 * self._chunk + 8 * values

    def acting(self, rows: int) -> int:
        """Return what it takes to act for so many environments, besides weights and inputs."""
        inputs = self._inputs(rows)
        with LiveMemory() as live, torch.device("meta"):
            self._policy.act(inputs)
        return live.peak

    def kept(self, batch: int, rows: int, learning: int) -> int:
        """Return what the host's allocator keeps of a batch that was learned from.

        Args:
            batch: samples of an optimizer step.
            rows: those of a forward and backward pass.
            learning: what `learning` returns for them.
        """
        tensors = (batch * _bytes((each,)) for each in self._example.values())
        if learning > LARGEST_KEPT:
            learning = self.learning(rows, batch // rows, largest=LARGEST_KEPT)
        return learning + sum(size for size in tensors if size <= LARGEST_KEPT)

    def learning(self, rows: int, passes: int, *, largest: int | None = None) -> int:
        """Return what it takes to learn, besides weights, gradients, the optimizer's state and the batch.

        Args:
            rows: samples of a forward and backward pass.
            passes: those of an optimizer step. From the second on all gradients are there meanwhile.
            largest: tensors of more bytes are not counted; None: all are.
        """
        policy, inputs = self._policy, self._inputs(rows)
        actions = policy.act(inputs).actions
        policy.zero_grad()
        with LiveMemory(largest) as live, torch.device("meta"):
            self._pass(inputs, actions, passes)
            within = live.peak - live.now
            live.peak = live.now
            self.check_weights()
            checking = live.peak - live.now
        policy.zero_grad()
        return max(within, checking)

    def take_step(self, batch: int, rows: int) -> None:
        """Gather a batch and learn from it in passes of `rows` samples, for what that does to the heap.

        Passes are alike: from the second on all gradients are there.
        """
        example = self._actions
        self._policy.zero_grad()
        inputs, actions = self._inputs(batch), example.new_empty((batch, *example.shape[1:]))
        self._pass({name: each[:rows] for name, each in inputs.items()}, actions[:rows], batch // rows)

    def forget(self) -> None:
        """Drop the gradients of `take_step`."""
        self._policy.zero_grad()

    def optimizer_state(self) -> list[Tensor]:
        """Return the optimizer's two moments of each trained weight."""
        trained = [each for each in self._policy.parameters() if each.requires_grad]
        return [torch.zeros_like(each) for each in trained for _ in range(2)]

    def check_weights(self) -> None:
        """Look at trained weights for NaN and infinities, one after the other, as training does."""
        for each in self._policy.parameters():
            if each.requires_grad:
                each.detach().isfinite()

    def _pass(self, inputs: Inputs, actions: Tensor, passes: int) -> None:
        policy = self._policy
        for _ in range(min(2, passes)):
            losses = policy.imitation_losses(inputs, actions) if self._imitates else policy.forward(inputs, actions)
            _loss(losses).backward()
            del losses

    @cached_property
    def _actions(self) -> Tensor:
        return self._policy.act(self._inputs(1)).actions

    def _inputs(self, rows: int) -> Inputs:
        return {name: each.new_empty((rows, *each.shape[1:])) for name, each in self._example.items()}


def example_inputs(policy: BasePolicy, spec: EnvSpec, count: int, device: str = "cpu") -> Inputs:
    """Return what the policy makes of zeros, for `count` environments, on a device."""
    found: dict[str, Any] = {}
    for name, (shape, kind) in spec.observations.items():
        found[name] = np.array(["move"] * count) if name == INSTRUCTIONS else np.zeros((count, *shape), kind)
    return {name: each.to(device) for name, each in policy.prepare(found).items()}


def _loss(found: ActionEval | Tensor) -> Tensor:
    if isinstance(found, Tensor):
        return found.sum()
    loss = found.logprobs.sum() + found.entropy.sum()
    return loss if found.values is None else loss + found.values.sum()


def _weights(policy: nn.Module) -> int:
    """Return the bytes of all weights and buffers, those that layers share once."""
    state: dict[str, Tensor] = policy.state_dict(keep_vars=True)
    return _bytes({id(each): each for each in state.values()}.values())


def _factors(layer: OrthogonalLinear) -> int:
    """Return what orthogonal weights are made from: random numbers of their shape, Q of it too, and a square R.

    `nn.init.orthogonal_` does nothing on the meta device.
    """
    return (2 * layer.weight.numel() + min(layer.weight.shape) ** 2) * layer.weight.element_size()


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
