"""The type of numpy arrays whose dtype the code that handles them does not depend on. numpy only."""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import NDArray

# The dtype stays open: `NDArray[np.generic]` would refuse arithmetic, and an observation may be text.
Array: TypeAlias = NDArray[Any]
