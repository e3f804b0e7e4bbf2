"""Parts of the memory of processes that train, for forecasts."""

from __future__ import annotations

from typing import Final

from recipes.sections.actor import FsdpConfig

_MIB: Final = 2**20
# What a worker holds before it holds anything of a job, measured on Linux with the CPU build of torch: the interpreter
# with Ray and its connections; what torch, its training and transformers add to it.
WORKER: Final = 132 * _MIB
TORCH: Final = 186 * _MIB
TRAINING: Final = 16 * _MIB
TRANSFORMERS: Final = 172 * _MIB
# Bytes of both moments for each byte of a weight in float32; int8 has three scales in float32 for 256 numbers.
_MOMENTS: Final = {"fp32": 2.0, "bf16": 1.0, "int8": 0.5 + 3 / 256}


def shard_parts(
    weights: int, trained: int, fsdp: FsdpConfig, count: int, *, state_dtype: str = "fp32"
) -> dict[str, int]:
    """Return what one of `count` training workers holds: its shards of all weights and of the trained ones, in float32,
    with gradients and AdamW's two moments in `optim.state_dtype`. `cpu_offload` keeps them on the host.
    """
    shards = 1 if fsdp.sharding_strategy == "no_shard" else count
    moments = int(trained * _MOMENTS[state_dtype])
    if fsdp.cpu_offload:
        return {"offloaded shards": (weights + trained + moments) // shards}
    return {"weights": weights // shards, "gradients": trained // shards, "optimizer": moments // shards}
