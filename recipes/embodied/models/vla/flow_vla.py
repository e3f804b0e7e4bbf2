"""Base of the vision-language-action models by flow matching: observations, statistics, values.

A vision-language model reads images and instruction once; a small expert then turns noise into a chunk of actions in K
steps, attending to the model's keys and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import FlowVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput, value_head
from recipes.embodied.models.flow_policy import FlowMatchingPolicy, Velocity, check_horizon, flow_sde
from recipes.embodied.models.vla.vision_language import encoded_prompts
from recipes.training.arrays import Array
from rlinf_core import ConfigError

TOKENS, MASK, ORIGINS = "prompt.tokens", "prompt.mask", "action.origins"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that a flow model was made for.

    Attributes:
        width: the width of an embedding of its vision-language model.
        states: the size of a state; shorter states are padded with 0.
        actions: the size of an action; shorter actions are padded likewise.
        horizon: the number of actions predicted together.
        vocabulary: the number of tokens that it knows.
        steps: the number of steps from noise to actions.
        beta, scale, offset: the distribution of training times: the share of noise is offset + scale * Beta(*beta).
    """

    width: int
    states: int
    actions: int
    horizon: int
    vocabulary: int
    steps: int
    beta: tuple[float, float] = (1.5, 1.0)
    scale: float = 0.999
    offset: float = 0.001


class ReadObservation(NamedTuple):
    """An observation as encoded by the vision-language model.

    Attributes:
        summary: mean of its last hidden states, [n, W].
        memory: keys and values of each layer.
        mask: bool [n, P], tokens that are not padding.
    """

    summary: Tensor
    memory: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor


class FlowVlaPolicy(FlowMatchingPolicy):
    """A vision-language model and an action expert, with one value per chunk, V = 1.

    A subclass makes both, as one network of a library, and defines their use. In the library's convention the network
    reverses time: 1 is noise, and velocities point toward it.

    Args:
        config: the section `actor.model`.
        spec: the spec of the environment.
        network: the network; the subclass also registers it as a part of the policy, possibly wrapped in LoRA.
        tokenizer: its tokenizer.
        sizes: the sizes of the model.

    Attributes:
        options: the options of `actor.model.options`.
        tokenizer: the model's tokenizer.
    """

    reads_instructions = True
    _without_greedy = "its instructions need a tokenizer"
    options: FlowVlaOptions

    def __init__(
        self, config: EmbodiedModelConfig, spec: EnvSpec, network: Any, tokenizer: Any, sizes: ModelSizes
    ) -> None:
        name, space = config.model_type, sizes.actions
        for what, needed, room in (("state", spec.state_size, sizes.states), ("action", spec.action_size, space)):
            if needed > room:
                raise ConfigError(
                    f"`{name}` holds {room} numbers per {what}; the environment needs {needed}",
                    where=config.model_path,
                    help="it was made for another robot: name a larger model, or leave `model_path` out",
                )
        check_horizon(config.num_action_chunks, sizes.horizon, config.model_path)
        options = cast("FlowVlaOptions", config.options)
        _check_relative(config, spec, options)
        self.options = options
        steps = options.steps or sizes.steps
        super().__init__(flow_sde(options, steps), (config.num_action_chunks, spec.action_size), space, sizes.horizon)
        self._cameras = [image_key(camera) for camera in spec.cameras]
        self._has_states, self._has_instructions = spec.state_size > 0, spec.has_instructions
        self._base, self.tokenizer, self._sizes = [network], tokenizer, sizes
        self._checkpoints = False
        self.critic: nn.Module | None = None
        if config.add_value_head:
            inputs = sizes.width + spec.state_size
            self.critic = value_head(inputs, sizes.width)

    @property
    def base(self) -> Any:
        """The network of transformers or lerobot, without a LoRA wrapper around it."""
        return self._base[0]

    @property
    def expert_type(self) -> torch.dtype:
        """Dtype of the expert's weights."""
        return self.base.action_out_proj.weight.dtype

    @property
    @abstractmethod
    def trained_by(self) -> str:
        """The library whose training procedure it follows: `lerobot`, `openpi`, ..."""

    @abstractmethod
    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        """Encode an observation with padded states, [n, S'], by the vision-language model."""

    @abstractmethod
    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        """Return the velocity [n, C, M] at a chunk and the times [n], from noise at 0 to actions at 1."""

    def times(self, count: int) -> Tensor:
        """See `FlowMatchingPolicy`: samples near noise have more weight."""
        sizes = self._sizes
        noisy = torch.distributions.Beta(*sizes.beta).sample((count,)) * sizes.scale + sizes.offset
        return (1 - noisy).to(next(self.parameters()).device)

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: images unchanged, states normalized, the prompt as tokens of fixed length."""
        first = observations[self._cameras[0]]
        texts: list[str] = observations[INSTRUCTIONS].tolist() if self._has_instructions else [""] * len(first)
        named: dict[str, Array] = {key: observations[key] for key in self._cameras}
        if self._has_states:
            named[STATES] = self.normalization.normalized_states(observations[STATES]).astype(np.float32)
        prompts = self.prompts(texts, named.get(STATES))
        longest, vocabulary = self.options.max_prompt_tokens, self._sizes.vocabulary
        tokens, mask = encoded_prompts(self.tokenizer, prompts, longest, "right", vocabulary)
        if self.options.relative_actions:
            # Raw states, since normalized ones would not restore them exactly.
            origins = np.zeros((len(first), self.shape[1]), np.float32)
            origins[:, : self.options.relative_actions] = observations[STATES][:, : self.options.relative_actions]
            named[ORIGINS] = origins
        return super().prepare({TOKENS: tokens, MASK: mask, **named})

    def prompts(self, instructions: list[str], states: NDArray[np.float32] | None) -> list[str]:
        """Return the texts for the model, including their start tokens.

        Args:
            instructions: n of them.
            states: normalized, [n, S]; None: there are none.
        """
        return [self.options.prompt.replace("{instruction}", text) + "\n" for text in instructions]

    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`; the reference of relative actions comes last, A more numbers each."""
        output = super().act(inputs, greedy=greedy, generator=generator)
        if not self.options.relative_actions:
            return output
        origins = inputs[ORIGINS][:, None].expand(-1, self.horizon, -1)
        return replace(output, actions=torch.cat((output.actions, origins.to(output.actions.dtype)), dim=-1))

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        return super().forward(inputs, self._split(actions)[0])

    def to_env(self, actions: Tensor) -> Array:
        drawn, origins = self._split(actions)
        taken = super().to_env(drawn)
        return taken if origins is None else taken + origins[:, : self.shape[0]].cpu().numpy()

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`: relative actions stay unchanged; `imitation_losses` knows their reference."""
        return BasePolicy.from_env(self, actions) if self.options.relative_actions else super().from_env(actions)

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `FlowMatchingPolicy`. As in lerobot, the padding of actions is left out; openpi learns that it is 0."""
        if self.options.relative_actions:
            actions = self.normalization.normalized_actions(actions - inputs[ORIGINS][:, None])
        losses = super().imitation_losses(inputs, actions)
        return losses[..., : self.shape[1]] if self.trained_by == "lerobot" else losses

    def _split(self, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the samples, and the reference of relative actions, [n, H, A]; None: no action is relative."""
        if not self.options.relative_actions:
            return actions, None
        return actions[..., : -self.shape[1]], actions[..., -self.shape[1] :]

    def see(self, inputs: Inputs) -> ReadObservation:
        return self._computed(self.read, inputs, self._states(inputs))

    def velocity_of(self, seen: ReadObservation, inputs: Inputs) -> Velocity:
        """See `FlowMatchingPolicy`: in float32, whatever the type of the weights."""
        states, dtype = self._states(inputs), self.expert_type

        def velocity(chunk: Tensor, time: Tensor) -> Tensor:
            return self._computed(self.denoise, seen, states, chunk.to(dtype), time.float()).float()

        return velocity

    def values_of(self, seen: ReadObservation, inputs: Inputs) -> Tensor | None:
        """See `FlowMatchingPolicy`: from the encoded observation and the states, which the model does not see."""
        if self.critic is None:
            return None
        features = [seen.summary, *([inputs[STATES]] if self._has_states else [])]
        dtype = next(self.critic.parameters()).dtype
        return self.critic(torch.cat([feature.to(dtype) for feature in features], dim=1))

    def checkpoint_activations(self) -> None:
        """See `BasePolicy`: recomputes the encoding, and each denoising step, as a whole."""
        self._checkpoints = True

    def _states(self, inputs: Inputs) -> Tensor:
        """Return states with the padding that the model expects, [n, S'], in the type of its weights."""
        if not self._has_states:
            return inputs[TOKENS].new_zeros((len(inputs[TOKENS]), self._sizes.states), dtype=self.expert_type)
        states = inputs[STATES].to(self.expert_type)
        return functional.pad(states, (0, self._sizes.states - states.shape[1]))

    def _computed(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Apply a function, with activation checkpointing if `gradient_checkpointing` is on."""
        if not self._checkpoints or not torch.is_grad_enabled():
            return function(*arguments)
        return cast("Result", checkpoint(function, *arguments, use_reentrant=False))


def check_observations(config: EmbodiedModelConfig, spec: EnvSpec) -> None:
    """Check that an environment has images and continuous actions.

    Raises:
        ConfigError: it lacks images, or its actions are discrete.
    """
    if not spec.cameras or spec.num_choices is not None:
        missing = "images" if not spec.cameras else "continuous actions"
        raise ConfigError(
            f"`{config.model_type}` needs {missing}, but the environment has none", help="use `mlp_policy`"
        )


def _check_relative(config: EmbodiedModelConfig, spec: EnvSpec, options: FlowVlaOptions) -> None:
    """Check that relative actions have a state to be relative to, and statistics.

    Raises:
        ConfigError: states or statistics are missing.
    """
    count = options.relative_actions
    if not count:
        return
    if count > min(spec.state_size, spec.action_size):
        raise ConfigError(
            f"`relative_actions` is {count}, but the environment has {spec.state_size} numbers in a state and"
            f" {spec.action_size} in an action",
            help="write how many of the leading numbers are relative",
        )
    if config.model_path is None or options.statistics == "none":
        raise ConfigError(
            "`relative_actions` needs the statistics of the model's own folder",
            why="statistics of demonstrations describe actions as executed, not relative ones",
            help="name a `model_path` with statistics, or remove `relative_actions`",
        )
