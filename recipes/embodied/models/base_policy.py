"""The interface of policies, wide enough for a vision-language-action model.

A policy answers one observation with a chunk of C actions of D tokens each. For a continuous action D is its size; for
a discrete action D is 1; a language model that spells out actions has D tokens for each. Log-probabilities are per
token, [n, C, D], and `algorithm.logprob_type` decides how they are summed.

What happens to an observation:

    prepare(observations)        arrays of the environment -> named tensors, `inputs` (a processor, a tokenizer)
    act(inputs)                  draws actions, where rollouts are made forward(inputs, actions)     evaluates those
    actions again, where training happens, with gradients values(inputs)               only values, for the observation
    in which an episode ended to_env(actions)              what was drawn -> what the environment takes
    from_env(actions)            the way back, for actions that somebody demonstrated imitation_losses(...)        how
    far it is from acting as demonstrated, with gradients imitation_loss(...)          the mean of these over the
    actions that count

`inputs` travel from rollout to actor with the actions, so that nothing is prepared twice. Training calls only `forward`
and `imitation_loss`, for which FSDP gathers weights.

Below it are layers and action distributions that several policies share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.models.normalization import Normalization
from recipes.training.arrays import Array
from recipes.training.huggingface import transformer_layers
from rlinf_core import ConfigError

INITIAL_LOG_STD = -0.5
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2


class OrthogonalLinear(nn.Linear):
    """A layer with orthogonal initial weights of the given gain, and no bias."""

    def __init__(self, inputs: int, outputs: int, gain: float = math.sqrt(2)) -> None:
        super().__init__(inputs, outputs)
        nn.init.orthogonal_(self.weight, gain)
        nn.init.zeros_(self.bias)


def hidden_layers(inputs: int, width: int) -> nn.Sequential:
    """Return two tanh layers, as is usual for PPO on states."""
    return nn.Sequential(OrthogonalLinear(inputs, width), nn.Tanh(), OrthogonalLinear(width, width), nn.Tanh())


def value_head(inputs: int, width: int) -> nn.Sequential:
    """Return a head for one value, with a hidden tanh layer."""
    return nn.Sequential(OrthogonalLinear(inputs, width), nn.Tanh(), OrthogonalLinear(width, 1, 1.0))


def with_value_head(values: Tensor | None) -> Tensor:
    """Return the values, which must not be None.

    Raises:
        ValueError: the policy has no value head.
    """
    if values is None:
        raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
    return values


class ActionHead(nn.Module, ABC):
    """A network from features [n, F] to a distribution over chunks of C actions of D tokens."""

    @abstractmethod
    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw actions; return them and their log-probabilities, both [n, C, D]."""

    @abstractmethod
    def likeliest(self, features: Tensor) -> Tensor:
        """Return the likeliest actions, [n, C, D]."""

    @abstractmethod
    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of actions, and entropies; both [n, C, D]."""


class GaussianHead(ActionHead):
    """Independent normal distributions, whose stds are weights, equal for all observations."""

    def __init__(self, features: int, chunk: int, size: int) -> None:
        super().__init__()
        self.shape = (chunk, size)
        self.mean = OrthogonalLinear(features, chunk * size, 0.01)
        self.log_std = nn.Parameter(torch.full((chunk, size), INITIAL_LOG_STD))

    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        mean = self._mean(features)
        noise = torch.zeros_like(mean)
        if not greedy:
            noise.normal_(generator=generator)
        return mean + self.log_std.exp() * noise, -noise.square() / 2 - self.log_std - _LOG_SQRT_TAU

    def likeliest(self, features: Tensor) -> Tensor:
        return self._mean(features)

    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        away = (actions - self._mean(features)) * (-self.log_std).exp()
        entropy = (0.5 + _LOG_SQRT_TAU + self.log_std).expand_as(actions)
        return -away.square() / 2 - self.log_std - _LOG_SQRT_TAU, entropy

    def _mean(self, features: Tensor) -> Tensor:
        return self.mean(features).view(-1, *self.shape)


class ChoiceHead(ActionHead):
    """A categorical distribution over discrete actions, for each action of a chunk."""

    def __init__(self, features: int, chunk: int, choices: int) -> None:
        super().__init__()
        self.shape = (chunk, choices)
        self.logits = OrthogonalLinear(features, chunk * choices, 0.01)

    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        logprobs = self._logprobs(features)
        if greedy:
            actions = logprobs.argmax(dim=-1, keepdim=True)
        else:
            # The argmax of logits plus Gumbel noise is a sample; minus the log of exponential noise is Gumbel noise.
            noise = torch.empty_like(logprobs).exponential_(generator=generator)
            actions = (logprobs - noise.log()).argmax(dim=-1, keepdim=True)
        return actions, logprobs.gather(-1, actions)

    def likeliest(self, features: Tensor) -> Tensor:
        return self._logprobs(features).argmax(dim=-1, keepdim=True)

    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = self._logprobs(features)
        return logprobs.gather(-1, actions), -(logprobs.exp() * logprobs).sum(dim=-1, keepdim=True)

    def _logprobs(self, features: Tensor) -> Tensor:
        return self.logits(features).view(-1, *self.shape).log_softmax(dim=-1)


def action_head(features: int, chunk: int, spec: EnvSpec) -> ActionHead:
    """Return the head for the environment's kind of actions."""
    if spec.num_choices is None:
        return GaussianHead(features, chunk, spec.action_size)
    return ChoiceHead(features, chunk, spec.num_choices)


Inputs: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Actions of a policy for n observations.

    Attributes:
        actions: [n, C, D], float32 numbers or int64 tokens, as `forward` takes them. A policy that must record more
            than tokens, as in flow matching, may use another shape, [n, ...].
        logprobs: float32 [n, C, D]; None: greedy actions of a policy that has no log-probabilities for them.
        values: float32 [n, V], per chunk (V = 1) or per action (V = C); None without a value head.
    """

    actions: Tensor
    logprobs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class ActionEval:
    """Log-probabilities, entropies and values of the passed actions, with gradients.

    Attributes:
        logprobs: float32 [n, C, D].
        entropy: float32 [n, C, D], the entropy of each token's distribution.
        values: float32 [n, V]; None without a value head.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class BasePolicy(nn.Module, ABC):
    """A policy. `actor.model.model_type: package.module:Class` names a custom one.

    Its constructor takes `(config, spec)`: the section `actor.model` and the `EnvSpec` of the environment.

    Attributes:
        loads_model_path: whether the constructor itself loads other folders than those of saved policies.
        loads_policies: whether the constructor also loads saved policies of other kinds.
        reads_instructions: whether the policy acts on the environment's instructions.
        normalizes_states: whether the policy acts on and learns from states normalized by `normalization`, so that
            `algorithm.normalize_observations` can update its statistics.
        normalization: the normalization of states and actions, saved with the weights; policies apply it in `prepare`,
            `to_env` and `from_env`.
        horizon: the number of actions predicted together, if more than the C executed ones; `imitation_losses` takes
            that many. 0: C.
        first_action: the index of the first of these actions, relative to the current observation; below 0 for a policy
            that also predicts past actions.
        observed_steps: T, the consecutive observations that the policy acts on; `prepare` gets the earlier ones as
            `past.NAME` [n, T - 1, ...], oldest first.
        noise_shape: the shape, per observation, of the noise that determines the actions; None: actions are no function
            of such noise alone.
    """

    horizon: int = 0
    first_action: int = 0
    observed_steps: int = 1
    noise_shape: tuple[int, int] | None = None
    loads_model_path: ClassVar[bool] = True
    loads_policies: ClassVar[bool] = False
    reads_instructions: ClassVar[bool] = False
    normalizes_states: ClassVar[bool] = False
    # Why the policy has no `greedy`, for the error.
    _without_greedy: ClassVar[str] = "it has no `greedy`"
    normalization: Normalization = Normalization()

    @property
    def blocks(self) -> list[nn.Module]:
        """The parts whose shards are gathered one at a time: the transformer layers that the policy calls.

        A policy that uses parts of its layers without calling the layers must leave these out.
        """
        return transformer_layers(self)

    def prepare(self, observations: Observation) -> Inputs:
        """Return observations of n environments as tensors on the weights' device; by default the numeric arrays."""
        device = next(self.parameters()).device
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # pyright: ignore[reportUnknownMemberType]
            for name, array in observations.items()
            if array.dtype.kind in "fiub"
        }

    def recorded(self, inputs: Inputs) -> Inputs:
        """Return the inputs that training needs again; by default all."""
        return inputs

    @abstractmethod
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """Draw actions, without gradients.

        Args:
            inputs: the inputs of `prepare`.
            greedy: whether to take the likeliest action, for evaluations.
            generator: source of randomness; None: torch's own.
        """

    def from_noise(self, inputs: Inputs, noise: Tensor) -> Tensor:
        """Return the actions [n, ...], as `to_env` takes them, for noise [n, *noise_shape]; without gradients.

        Raises:
            ValueError: the policy has no `noise_shape`.
        """
        raise ValueError(f"actions of a `{type(self).__name__}` do not come from noise alone")

    def greedy(self, observations: Inputs) -> Tensor:
        """Return the likeliest actions [n, C, A] for raw observations, by tensor operations alone.

        This is the function of an export in a foreign format: the same as `prepare`, a greedy `act` and `to_env`.

        Args:
            observations: `states` float32 [n, S], `images.CAMERA` uint8 [n, H, W, 3]; n may be any.

        Returns:
            Actions as the environment takes them: numbers, or discrete int64 [n, C, 1].

        Raises:
            ConfigError: the policy does more than tensors can express.
        """
        raise ConfigError(
            f"`{type(self).__name__}` cannot be exported as a tensor graph",
            why=self._without_greedy,
            help="export it with `--format safetensors`: a folder that `load_policy` reads; a policy of your own may"
            " implement `greedy`",
        )

    def predicted(self, inputs: Inputs) -> Tensor:
        """Return the likeliest actions of the whole horizon, [n, H, ...], in the form that `to_env` takes."""
        return self.act(inputs, greedy=True).actions

    @abstractmethod
    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """Evaluate actions [n, C, D] that `act` drew, with gradients."""

    @abstractmethod
    def values(self, inputs: Inputs) -> Tensor:
        """Return values, float32 [n, V], without gradients.

        Raises:
            ValueError: the policy has no value head.
        """

    def to_env(self, actions: Tensor) -> Array:
        """Return actions [n, C, A] as environments take them; by default unchanged."""
        return actions.cpu().numpy()

    def from_env(self, actions: Array) -> Tensor:
        """Return demonstrated actions [n, C, A] as `forward` takes them, [n, C, D]: the inverse of `to_env`."""
        device = next(self.parameters()).device
        taken = torch.from_numpy(np.ascontiguousarray(actions)).to(device)  # pyright: ignore[reportUnknownMemberType]
        return taken.float() if taken.is_floating_point() else taken.long()

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return the loss of learning from demonstrations; by default the negative log-probability of each token.

        A policy without log-probabilities, such as one by flow matching, overrides this.

        Args:
            inputs: the inputs of `prepare`.
            actions: [n, C, D], of `from_env`.

        Returns:
            float32 [n, C, D], with gradients. The loss is the mean over valid actions.
        """
        return -self.forward(inputs, actions).logprobs

    def imitation_loss(self, inputs: Inputs, actions: Tensor, valid: Tensor) -> Tensor:
        """Return the mean of `imitation_losses` over the valid actions; a policy whose loss is not per action overrides
        this.

        Args:
            inputs: the inputs of `prepare`.
            actions: [n, C, D], of `from_env`.
            valid: bool [n, C], actions that were executed before their episode ended.
        """
        losses = self.imitation_losses(inputs, actions).float()
        counted = valid.reshape(*valid.shape, *(1,) * (losses.dim() - 2)).expand_as(losses)
        return (losses * counted).sum() / counted.sum()

    def normalization_of(self, states: Array | None, actions: Array) -> Normalization | None:
        """Return statistics of demonstrated states [N, S] and actions [N, A] in the only form that the policy can use;
        None if it can use any (`data.normalization`).
        """
        return None

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass instead of keeping them: `gradient_checkpointing: true`.

        Raises:
            ConfigError: the policy does not support it.
        """
        raise ConfigError(
            f"`{type(self).__name__}` does not support activation checkpointing",
            help="remove `actor.fsdp_config.gradient_checkpointing`",
        )

    def describe_images(self) -> dict[str, Any]:
        """Return the preprocessing of camera images, uint8, before the network, as plain data; empty if the policy uses
        no images or does not describe it."""
        return {}

    def save_files(self, folder: Path) -> None:
        """Write what a policy folder needs besides weights and statistics, such as a tokenizer."""
