"""The way of a captured picture into an observation: cut out, then scaled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.camera_config import CameraOptions

Box = tuple[int, int, int, int]


def fitted(image: NDArray[np.uint8], options: CameraOptions) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3] in the size of the observation, without distortion where no `crop` is given.

    Every pixel is the mean of those that it covers, as a camera's own would be.
    """
    height, width = image.shape[:2]
    box = options.crop or middle(height, width, options.height, options.width)
    if box == (0, 0, width, height) and (height, width) == (options.height, options.width):
        return image
    from PIL import Image

    picture = Image.fromarray(image)
    return np.array(picture.resize((options.width, options.height), Image.Resampling.BOX, box))


def middle(height: int, width: int, wanted_height: int, wanted_width: int) -> Box:
    """Return the largest box around the middle of a picture that has the shape of another size."""
    share = min(width / wanted_width, height / wanted_height)
    wide, high = min(width, round(share * wanted_width)), min(height, round(share * wanted_height))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
