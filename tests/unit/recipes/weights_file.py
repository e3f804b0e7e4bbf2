"""A file of weights that is whole: a header of safetensors and one number for each tensor."""

from __future__ import annotations

import json


def weights_of(*names: str) -> bytes:
    """Return a file of tensors of one number."""
    tensors = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * place, 4 * place + 4]}
        for place, name in enumerate(names)
    }
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


WEIGHTS = weights_of("weight")
