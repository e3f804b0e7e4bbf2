"""Messages between environments and policies are taken apart by rows, and put together again."""

from __future__ import annotations

import numpy as np

from recipes.embodied.loop.env_messages import sliced, stacked


def test_messages_are_taken_apart_and_put_together() -> None:
    message = {"observations": {"states": np.arange(8).reshape(4, 2)}, "rewards": np.arange(4)}
    parts = [sliced(message, 0, 3, 4), sliced(message, 3, 4, 4)]
    again = stacked(parts)
    assert (again["observations"]["states"] == message["observations"]["states"]).all()
    assert again["rewards"].tolist() == [0, 1, 2, 3]
    assert sliced(message, 0, 4, 4) is message
