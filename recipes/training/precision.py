"""Data types by the names that `precision` and `mixed_precision` use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
