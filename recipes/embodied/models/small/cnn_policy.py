"""A policy on the images of all cameras, and on states if there are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import STATES, EnvSpec, ImageShape, image_key
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.heads import OrthogonalLinear
from recipes.embodied.models.small.feature_policy import SeparateNetworks
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

# What three convolutions need for one pixel of output: those of Mnih et al., and small ones.
SMALLEST_IMAGE, _SMALLEST_OF_MNIH = 15, 36


# What `ImageEncoder` does to images.
SCALED_IMAGES: Final = {"resized": None, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0], "scale": 1 / 255}


class CnnPolicy(SeparateNetworks):
    """Three convolutions for each camera as in Mnih et al., "Human-level control through deep reinforcement learning"
    (2015), for images below 36 pixels small ones; then one hidden layer of `hidden_dim`; for actions and for values.
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
        """See `BasePolicy`."""
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
    """Return the layers for one camera; each is a width, the size of its kernel and its stride."""
    shapes = ((32, 3, 2), (64, 3, 2), (64, 3, 2)) if small else ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    layers: list[nn.Module] = []
    for width, size, stride in shapes:
        layers += [nn.Conv2d(channels, width, size, stride), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())
