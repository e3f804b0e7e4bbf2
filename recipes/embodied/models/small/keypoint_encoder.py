"""Places of learned colours in images, as features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.envs.env_spec import ImageShape
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.models.base_policy import Inputs

KEYPOINTS: Final = 8  # in the images of one camera
_WIDTH: Final = 16
_SHARPNESS: Final = 3.0
_CACHED: Final = 32  # images
_EPSILON: Final = 1e-6  # added to a variance


class ColourKeypoints(nn.Module):
    """The mean places of `KEYPOINTS` learned colours in an image: a spatial softmax (Levine et al. 2016, arXiv
    1504.00702) over scores of each pixel alone, which are normalized over the image, so that what is small and of its
    own colour stands out before anything is learned.
    """

    places: Tensor

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        height, width, channels = shape
        self.hidden = nn.Linear(channels, _WIDTH)
        self.scores = nn.Linear(_WIDTH, KEYPOINTS, bias=False)  # normalization would take a bias away
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        self.register_buffer("places", torch.stack((rows, columns), dim=-1).flatten(0, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows and columns from -1 to 1, [n, 2 * KEYPOINTS], of uint8 [n, H, W, channels]."""
        traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - public, and left out of a list
        if images.device.type != "cpu" or traced or torch.compiler.is_compiling():
            # An exported graph takes any number of images.
            return self._keypoints(images)
        # On a CPU parts that fit into its cache are faster than the whole.
        return torch.cat([self._keypoints(part) for part in torch.split(images, _CACHED)])

    def _keypoints(self, images: Tensor) -> Tensor:
        count, weight = images.shape[0], self.hidden.weight
        # Pixels are columns, so that all that is taken over an image lies in one row, and the linear layer scales
        # them from -0.5 to 0.5: each operation on its own would take as long as the layer.
        pixels = images.flatten(0, 2).t().to(weight.dtype, memory_format=torch.contiguous_format)
        bias = self.hidden.bias - weight.sum(dim=1) / 2
        hidden = torch.addmm(bias[:, None], weight / 255, pixels).relu()
        scores = (self.scores.weight @ hidden).view(KEYPOINTS, count, len(self.places))
        size = scores.shape[-1:]
        sharp = functional.layer_norm(scores, size, self.sharpness.expand(size), eps=_EPSILON)
        return (sharp.softmax(dim=2) @ self.places).transpose(0, 1).flatten(1)


class KeypointEncoder(nn.Module):
    """The keypoints of all cameras and the states, as features.

    Attributes:
        size: F, the number of features.
    """

    def __init__(self, cameras: Mapping[str, ImageShape], state_size: int) -> None:
        super().__init__()
        self.keys = [image_key(camera) for camera in cameras]
        self.cameras = nn.ModuleList(ColourKeypoints(shape) for shape in cameras.values())
        self.state_size = state_size
        self.size = 2 * KEYPOINTS * len(self.keys) + state_size

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [n, F] of `images.CAMERA` uint8 [n, H, W, channels] and of `states` float32 [n, S]."""
        features = [network(inputs[key]) for key, network in zip(self.keys, self.cameras, strict=True)]
        return torch.cat([*features, *([inputs[STATES]] if self.state_size else [])], dim=1)
