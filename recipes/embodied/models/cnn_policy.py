"""A policy on images, and on states beside them where there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.embodied.envs.types import EnvSpec
from recipes.embodied.models.base import Inputs
from recipes.embodied.models.feature_policy import FeaturePolicy
from recipes.embodied.models.heads import linear
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

SMALLEST_IMAGE = 36  # what the three convolutions need for one pixel of output


class CnnPolicy(FeaturePolicy):
    """Three convolutions as in Mnih et al., "Human-level control through deep reinforcement learning" (2015), then one
    hidden layer of `hidden_dim`; for actions and for values.
    """

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        if spec.image_shape is None:
            raise ConfigError("`cnn_policy` needs images, and the environment has none", help="use `mlp_policy`")
        height, width, channels = spec.image_shape
        if min(height, width) < SMALLEST_IMAGE:
            raise ConfigError(
                f"`cnn_policy` needs images of {SMALLEST_IMAGE} x {SMALLEST_IMAGE} or more, not {height} x {width}"
            )
        networks = (ImageEncoder((height, width, channels), spec.state_size, config.hidden_dim) for _ in range(2))
        super().__init__(config, spec, next(networks), next(networks), config.hidden_dim)

    def features_of(self, inputs: Inputs, network: nn.Module) -> Tensor:
        """Return features of `images` uint8 [n, H, W, channels] and `states`."""
        return network((inputs["images"], inputs.get("states")))


class ImageEncoder(nn.Module):
    """A network from an image and a state to features."""

    def __init__(self, image_shape: tuple[int, int, int], state_size: int, width: int) -> None:
        super().__init__()
        height, image_width, channels = image_shape
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, channels, height, image_width)).shape[1]
        self.state_size = state_size
        self.mix = nn.Sequential(linear(flat + state_size, width), nn.ReLU())

    def forward(self, observed: tuple[Tensor, Tensor | None]) -> Tensor:
        """Return features [n, F] of images uint8 [n, H, W, channels] and states float32 [n, S] or None."""
        images, states = observed
        dtype = next(self.parameters()).dtype
        features = self.convolutions(images.permute(0, 3, 1, 2).to(dtype) / 255)
        if self.state_size and states is not None:
            features = torch.cat((features, states), dim=1)
        return self.mix(features)
