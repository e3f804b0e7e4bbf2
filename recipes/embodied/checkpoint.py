"""Weights and optimizer on disk, in the format of torch.distributed.checkpoint.

Every rank writes its shards. Any number of ranks reads them again, because what is stored is whole tensors by name.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlinf_core.errors import CheckpointError

FOLDER: Final = "actor"


def save(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """Writes `folder/actor`; all ranks call it."""
    model, state = get_state_dict(policy, optimizer)
    with warnings.catch_warnings():
        # One rank needs no process group, and that is said on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {"model": model, "optimizer": state, "version": version},
            checkpoint_id=folder / FOLDER,
            no_dist=not dist.is_initialized(),
        )


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Reads `folder/actor` in place; all ranks call it.

    Returns:
        The version of the weights.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    options = StateDictOptions()
    model, state = get_state_dict(policy, optimizer, options=options)
    stored: dict[str, Any] = {"model": model, "optimizer": state, "version": 0}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(stored, checkpoint_id=folder / FOLDER, no_dist=not dist.is_initialized())
    except Exception as error:
        raise CheckpointError(
            "the weights of the checkpoint cannot be read",
            where=str(folder),
            why=(str(error).strip().splitlines() or [type(error).__name__])[0],
            help="the model must have the sizes that it had; `config.yaml` beside the checkpoints tells them",
        ) from error
    set_state_dict(
        policy, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"], options=options
    )
    return int(stored["version"])
