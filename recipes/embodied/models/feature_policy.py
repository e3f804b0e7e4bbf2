"""Policies that map an observation to features; heads for actions and values are supplied."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec, ImageShape, Observation
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.models.base_policy import (
    ActionEval,
    BasePolicy,
    Inputs,
    OrthogonalLinear,
    PolicyOutput,
    action_head,
    hidden_layers,
    with_value_head,
)
from recipes.training.arrays import Array
from rlinf_core import ConfigError


class FeaturePolicy(BasePolicy):
    """A policy with one layer each for actions and values, on the `features` of a subclass.

    With `add_value_head` there is one value per action of a chunk (V = C).

    Args:
        config: the section `actor.model`.
        spec: the spec of the environment.
        width: F, the number of features.
    """

    loads_model_path = False
    normalizes_states = True

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec, width: int) -> None:
        super().__init__()
        self._make_heads(config, spec, width)

    def _make_heads(self, config: EmbodiedModelConfig, spec: EnvSpec, width: int) -> None:
        self._width = width
        self.head = action_head(width, config.num_action_chunks, spec)
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = OrthogonalLinear(width, config.num_action_chunks, 1.0)

    @abstractmethod
    def features(self, inputs: Inputs) -> Tensor:
        """Return features float [n, F] of the inputs, with gradients: `states` [n, S], `images.CAMERA` uint8."""

    def _checked_features(self, inputs: Inputs) -> Tensor:
        """Return `features`.

        Raises:
            ConfigError: they are not [n, width].
        """
        features = self.features(inputs)
        if features.dim() != 2 or features.shape[1] != self._width:
            raise ConfigError(
                f"`features` of `{type(self).__name__}` returned a tensor {list(features.shape)}",
                why=f"the constructor passed `width={self._width}`",
                help="return [n, width], a row of as many numbers for each observation",
            )
        return features

    def _values(self, inputs: Inputs, features: Tensor | None = None) -> Tensor | None:
        """Return values [n, C], from `features` if passed; None without a value head."""
        if self.critic is None:
            return None
        return self.critic(self._checked_features(inputs) if features is None else features)

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`; states are normalized."""
        inputs = super().prepare(observations)
        if STATES in inputs:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        return inputs

    def to_env(self, actions: Tensor) -> Array:
        return super().to_env(self.normalization.actions_of(actions))

    def from_env(self, actions: Array) -> Tensor:
        return self.normalization.normalized_actions(super().from_env(actions))

    def greedy(self, observations: Inputs) -> Tensor:
        inputs = dict(observations)
        if STATES in inputs:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        return self.normalization.actions_of(self.head.likeliest(self.features(inputs)))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        features = self._checked_features(inputs)
        actions, logprobs = self.head.draw(features, greedy, generator)
        return PolicyOutput(actions, logprobs, self._values(inputs, features))

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        features = self._checked_features(inputs)
        logprobs, entropy = self.head(features, actions)
        return ActionEval(logprobs, entropy, self._values(inputs, features))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        return with_value_head(self._values(inputs))


class SeparateNetworks(FeaturePolicy):
    """Separate networks from `inputs` to features for actions and for values, which a subclass supplies."""

    def __init__(
        self, config: EmbodiedModelConfig, spec: EnvSpec, actor: nn.Module, critic: nn.Module, width: int
    ) -> None:
        BasePolicy.__init__(self)
        self.actor = actor
        self._make_heads(config, spec, width)
        if self.critic is not None:
            self.critic = nn.Sequential(critic, self.critic)

    def features_of(self, inputs: Inputs, network: nn.Module) -> Tensor:
        """Return features of the inputs by `network`, [n, F]."""
        return network(inputs[STATES])

    def features(self, inputs: Inputs) -> Tensor:
        return self.features_of(inputs, self.actor)

    def _values(self, inputs: Inputs, features: Tensor | None = None) -> Tensor | None:
        return None if self.critic is None else self.features_of(inputs, self.critic)


class MlpPolicy(SeparateNetworks):
    """Two hidden layers of `hidden_dim` each, for actions and for values."""

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        if not spec.state_size:
            raise ConfigError("`mlp_policy` needs states, but the environment has images", help="use `cnn_policy`")
        width = config.hidden_dim
        networks = (hidden_layers(spec.state_size, width) for _ in range(2))
        super().__init__(config, spec, next(networks), next(networks), width)


# The least image size for one output pixel of three convolutions: of the small ones, and of Mnih et al.
SMALLEST_IMAGE, _SMALLEST_OF_MNIH = 15, 36


# The image preprocessing of `ImageEncoder`.
SCALED_IMAGES: Final = {"resized": None, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0], "scale": 1 / 255}


class CnnPolicy(SeparateNetworks):
    """Three convolutions for each camera as in Mnih et al., "Human-level control through deep reinforcement learning"
    (2015), or small ones for images below 36 pixels; then one hidden layer of `hidden_dim`; separate for actions and
    for values.
    """

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        if not spec.cameras:
            raise ConfigError("`cnn_policy` needs images, but the environment has none", help="use `mlp_policy`")
        for camera, (height, width, _) in spec.cameras.items():
            if min(height, width) < SMALLEST_IMAGE:
                raise ConfigError(
                    f"`cnn_policy` needs images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE}; those of the camera"
                    f" `{camera}` are {height} x {width}"
                )
        networks = (ImageEncoder(spec.cameras, spec.state_size, config.hidden_dim) for _ in range(2))
        super().__init__(config, spec, next(networks), next(networks), config.hidden_dim)

    def describe_images(self) -> dict[str, Any]:
        return SCALED_IMAGES

    def features_of(self, inputs: Inputs, network: nn.Module) -> Tensor:
        """Return features of `images.CAMERA` uint8 [n, H, W, channels] and `states`."""
        return network(inputs)


class ImageEncoder(nn.Module):
    """A network from the images of all cameras and a state to features."""

    def __init__(self, cameras: Mapping[str, ImageShape], state_size: int, width: int) -> None:
        super().__init__()
        self.keys = [image_key(camera) for camera in cameras]
        self.convolutions = nn.ModuleList(
            _convolutions(channels, small=min(height, breadth) < _SMALLEST_OF_MNIH)
            for height, breadth, channels in cameras.values()
        )
        flat = 0
        with torch.no_grad():
            for network, (height, image_width, channels) in zip(self.convolutions, cameras.values(), strict=True):
                flat += network(torch.zeros(1, channels, height, image_width)).shape[1]
        self.state_size = state_size
        self.mix = nn.Sequential(OrthogonalLinear(flat + state_size, width), nn.ReLU())

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [n, F] of `images.CAMERA` uint8 [n, H, W, channels] and of `states` float32 [n, S]."""
        dtype = next(self.parameters()).dtype
        features = [
            network(inputs[key].permute(0, 3, 1, 2).to(dtype) / 255)
            for key, network in zip(self.keys, self.convolutions, strict=True)
        ]
        if self.state_size:
            features.append(inputs[STATES])
        return self.mix(torch.cat(features, dim=1))


def _convolutions(channels: int, *, small: bool) -> nn.Sequential:
    """Return the layers for one camera; each with a width, a kernel size and a stride.

    Initial weights are orthogonal, as those of the other layers. The first biases subtract 1/2 from each pixel:
    otherwise what all images share, such as a bright background, exceeds their differences by far, and the ReLUs after
    it can become 0 for every image, without a gradient.
    """
    shapes = ((32, 3, 2), (64, 3, 2), (64, 3, 2)) if small else ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    layers: list[nn.Module] = []
    for number, (width, size, stride) in enumerate(shapes):
        layer = nn.Conv2d(channels, width, size, stride, bias=False)
        nn.init.orthogonal_(layer.weight, math.sqrt(2))
        bias = layer.weight.detach().sum((1, 2, 3)) / -2 if number == 0 else torch.zeros(width)
        layer.bias = nn.Parameter(bias)
        layers += [layer, nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())
