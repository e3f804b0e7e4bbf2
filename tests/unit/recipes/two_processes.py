"""Two processes that train together, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]


def run_two(module: str, folder: Path, seconds: float = 100) -> list[dict[str, Any]]:
    """Run `python -m MODULE RANK FOLDER` for ranks 0 and 1, and return what each has saved as `FOLDER/RANK.pt`."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=seconds)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def as_rank(work: Callable[[int, Path], object]) -> None:
    """Be the rank that the command line names: join the other one, and save what `work` returns."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()
