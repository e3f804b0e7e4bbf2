"""A frozen diffusion or flow-matching policy, whose initial noise a small policy chooses.

DSRL, Wagenmaker et al. 2025, "Steering your diffusion policy with latent space reinforcement learning" (arXiv
2506.15799): the frozen policy is a function from an observation and noise to actions, so that noise is the action of a
derived task, which soft actor-critic learns. The frozen policy is not differentiated.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import SquashedOptions, SteeredOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.folder_facts import FROZEN, frozen_section, saved_type
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import built_policy, make_model
from recipes.embodied.models.squashed_policy import SquashedPolicy
from recipes.training.arrays import Array
from rlinf_core import ConfigError

# The prefix, among the inputs, of names of the frozen policy's inputs.
_OF_FROZEN: Final = "frozen/"


class SteeredPolicy(SquashedPolicy):
    """A policy of noise b * tanh(u) with W numbers, where u is normal, and of the frozen policy's actions for it.

    A drawn action is the noise, in units of the bound b, followed by the environment's actions: [n, 1, W + C * A].
    Evaluations use the likeliest noise.

    Attributes:
        frozen: the policy that is steered, without gradients.
        action_size: W, the size of the noise.
    """

    loads_policies: ClassVar[bool] = True
    options_model = SteeredOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        options = cast("SteeredOptions", config.options)
        section = frozen_section(config)
        if saved_type(config.model_path) == config.model_type:
            # The folder holds the weights of both policies, which are loaded together.
            frozen = built_policy(section, spec)
        else:
            frozen = make_model(section, spec)
        if frozen.noise_shape is None:
            raise not_steerable(section)
        steps, width = frozen.noise_shape
        size = width if options.repeats_noise else steps * width
        own = SquashedOptions(num_layers=options.num_layers)
        small = config.model_copy(update={"options": own, "num_action_chunks": 1})
        super().__init__(small, replace(spec, action_size=size, low=None, high=None))
        self.frozen = frozen.requires_grad_(False).eval()
        self.observed_steps = frozen.observed_steps
        self._section, self._options = section, options
        self._noise = (1 if options.repeats_noise else steps, width)
        self._carried_out = (config.num_action_chunks, spec.action_size)
        self._observed = frozenset(spec.observations)

    @property
    def normalization(self) -> Normalization:
        """The normalization of the frozen policy; the small policy takes raw observations."""
        return self.frozen.normalization

    @normalization.setter
    def normalization(self, normalization: Normalization) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.frozen.normalization = normalization

    @property
    def scaling(self) -> Normalization:
        """No normalization: noise is chosen from raw observations."""
        return Normalization()

    def normalization_of(self, states: Array | None, actions: Array) -> Normalization | None:
        """See `BasePolicy`; the frozen policy's."""
        return self.frozen.normalization_of(states, actions)

    def train(self, mode: bool = True) -> SteeredPolicy:
        """Set the mode of what is trained."""
        super().train(mode)
        self.frozen.eval()
        return self

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: raw observations, and the inputs of the frozen policy."""
        frozen = {f"{_OF_FROZEN}{name}": tensor for name, tensor in self.frozen.prepare(observations).items()}
        return self.recorded(super().prepare(observations)) | frozen

    def recorded(self, inputs: Inputs) -> Inputs:
        """See `BasePolicy`: the current observations."""
        return {name: tensor for name, tensor in inputs.items() if name in self._observed}

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        output = super().act(inputs, greedy=greedy, generator=generator)
        return self._steered(inputs, output.actions[:, 0], output.logprobs)

    @torch.no_grad()
    def random(self, inputs: Inputs) -> PolicyOutput:
        """See `SquashedPolicy`: actions of the frozen policy for normal noise within the bound."""
        noise = self.standard_noise(next(iter(inputs.values())))
        return self._steered(inputs, noise, torch.zeros_like(noise)[:, None])

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`: evaluates the noise."""
        return super().forward(inputs, actions[..., : self.action_size])

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        return actions[:, 0, self.action_size :].reshape(-1, *self._carried_out).cpu().numpy()

    def greedy(self, observations: Inputs) -> Tensor:
        """Refuse, see `BasePolicy`."""
        return BasePolicy.greedy(self, observations)

    def describe_images(self) -> dict[str, Any]:
        return self.frozen.describe_images()

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: those of the frozen policy, and its section of the configuration."""
        self.frozen.save_files(folder)
        section = self._section.model_dump(mode="json", exclude={"model_path"})
        (folder / FROZEN).write_text(json.dumps(section, indent=1) + "\n")

    @torch.no_grad()
    def carried_out(self, inputs: Inputs, noise: Tensor) -> Tensor:
        """Return the environment's actions, float32 [n, C * A], for noise [n, W].

        Args:
            inputs: the inputs of `prepare`.
            noise: noise in units of the bound, from -1 to 1.
        """
        steps, width = cast("tuple[int, int]", self.frozen.noise_shape)
        first = (noise * self._options.noise_bound).view(-1, *self._noise).expand(-1, steps, width)
        own = {name.removeprefix(_OF_FROZEN): inputs[name] for name in inputs if name.startswith(_OF_FROZEN)}
        actions = torch.from_numpy(self.frozen.to_env(self.frozen.from_noise(own, first.contiguous())))
        return actions.flatten(1).to(noise)

    def standard_noise(self, like: Tensor) -> Tensor:
        """Return normal noise [n, W], as in the frozen policy's training, in the units of `carried_out`; n and the
        device are those of `like`.
        """
        drawn = torch.randn(len(like), self.action_size, device=like.device)
        return (drawn / self._options.noise_bound).clamp(-1, 1)

    def _steered(self, inputs: Inputs, noise: Tensor, logprobs: Tensor | None) -> PolicyOutput:
        """Return noise [n, W] with its actions."""
        return PolicyOutput(torch.cat((noise, self.carried_out(inputs, noise)), dim=1)[:, None], logprobs, None)


def not_steerable(section: EmbodiedModelConfig) -> ConfigError:
    """Return the error about a policy whose actions are no function of selectable noise."""
    return ConfigError(
        f"a `{section.model_type}` cannot be steered: its actions do not come from noise alone",
        where="actor.model.model_path",
        help="name a policy by flow matching (`flow_policy`, `pi0`, `pi05`, `smolvla`), or a diffusion policy of"
        " lerobot, with `options: {policy: {options: {config: {noise_scheduler_type: DDIM}}}}`",
    )
