"""Weights and optimizer state on disk: whole tensors by name, in safetensors files of torch.distributed.checkpoint.

Every rank writes its shards, and any number of ranks can read them. The optimizer's settings come from the job file,
not from the checkpoint. torch.distributed.checkpoint takes a second to import; only the first checkpoint pays for it,
not the start of every run.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.optimizer import SmallStateAdamW
from recipes.training.tied_weights import beneath_adapters, new_adapters
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import lacks_room, write_fault

if TYPE_CHECKING:
    from recipes.training.weights.shard_files import ShardReader

ACTOR: Final = "actor"
# Prefixes of names in the files: of weights, and of the optimizer's state of each weight; and the name of the version,
# an integer.
MODEL: Final = "model."
OPTIMIZER: Final = "optimizer.state."
VERSION: Final = "version"
_UNREAD: Final = "the checkpoint's weights cannot be read"
_COPY: Final = "copy the checkpoint again from its source, or name another one"


def save(
    folder: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    version: int,
    component: str = ACTOR,
    *,
    frozen: bool = False,
) -> None:
    """Write `folder/actor`, or the folder of another component; all ranks of the component call this.

    Args:
        folder: the folder of the checkpoint.
        policy: the owner of the weights.
        optimizer: the optimizer of the weights.
        version: the version of the weights.
        component: the name of the folder in `folder`.
        frozen: also write weights that are not trained. Otherwise the model must be built with the same values, as from
            a HuggingFace folder.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    from torch.distributed.checkpoint import state_dict_saver

    from recipes.training.weights.shard_files import ShardWriter

    weights: dict[str, Tensor] = policy.state_dict()
    named = policy.named_parameters(remove_duplicate=False)
    left_out = set[str]() if frozen else {name for name, weight in named if not weight.requires_grad}
    tensors = {f"{MODEL}{name}": weight for name, weight in weights.items() if name not in left_out}
    tensors |= _optimizer_tensors(policy, optimizer)
    with _explained("the checkpoint's weights cannot be written", folder, "free disk space, or name another folder"):
        state_dict_saver.save(
            {**tensors, VERSION: torch.tensor(version)},
            storage_writer=ShardWriter(folder / component),
            no_dist=not dist.is_initialized(),
        )


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, component: str = ACTOR) -> int:
    """Read `folder/actor`, or the folder of another component, in place; all ranks of the component call this.

    Returns:
        The version of the weights.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    sizes = "the model must have the same sizes as when saved; `config.yaml` beside the checkpoints records them"
    with _explained(_UNREAD, folder, sizes):
        reader = _reader(folder, component)
        version = torch.zeros((), dtype=torch.int64)
        _read({**_weights(reader, policy), **_optimizer_tensors(policy, optimizer), VERSION: version}, reader, folder)
    return int(version)


def load_weights(folder: Path, policy: nn.Module, component: str = ACTOR) -> None:
    """Read only the weights of `folder/actor`, in place; all ranks of the component call this.

    An untrained weight may be missing, and keeps its value. Weights without adapters are read beneath new adapters,
    which keep their initial values.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    fits = "both `actor.model` sections must agree; `config.yaml` beside the checkpoints records the checkpoint's"
    with _explained(_UNREAD, folder, fits):
        reader = _reader(folder, component)
        _read(_weights(reader, policy), reader, folder)


def _reader(folder: Path, component: str) -> ShardReader:
    from recipes.training.weights.shard_files import ShardReader

    with _explained(_UNREAD, folder, _COPY):
        return ShardReader(folder / component)


def _read(tensors: dict[str, Tensor], reader: ShardReader, folder: Path) -> None:
    """Read tensors of a checkpoint in place; all ranks call it.

    Raises:
        CheckpointError: a file cannot be read.
        ValueError: a tensor is missing, or has another size or type.
    """
    from torch.distributed.checkpoint import state_dict_loader

    for name, tensor in tensors.items():
        stored = reader.tensors.get(name)
        if stored is None:
            raise ValueError(f"the checkpoint has no `{name}`")
        if stored.size != tensor.size():
            raise ValueError(f"`{name}` has the size {list(stored.size)}, the model's is {list(tensor.size())}")
        mine, theirs = tensor.dtype, stored.properties.dtype
        if mine != theirs and not (mine.is_floating_point and theirs.is_floating_point):
            raise ValueError(f"`{name}` is of {theirs}, the model's is of {mine}")
    with _explained(_UNREAD, folder, _COPY):
        state_dict_loader.load(cast("Any", tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _weights(reader: ShardReader, policy: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a policy that a checkpoint holds, by their names there.

    Raises:
        ValueError: the checkpoint lacks a trained weight.
    """
    state: Mapping[str, Tensor] = policy.state_dict()
    theirs = {name.removeprefix(MODEL) for name in reader.tensors if name.startswith(MODEL)}
    names = beneath_adapters(state, theirs)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    missing = sorted(name for name in trained - set(names) if name not in new_adapters(state, names.values()))
    if missing:
        raise ValueError(f"the checkpoint has no weight `{missing[0]}`")
    return {f"{MODEL}{stored}": state[mine] for mine, stored in names.items()}


def _optimizer_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors of all weights, by their names in a checkpoint.

    The state of weights that no loss has reached yet, such as value heads in imitation, is initialized here.
    """
    names = {id(weight): name for name, weight in policy.named_parameters()}
    return {
        f"{OPTIMIZER}{names[id(weight)]}.{part}": tensor
        for group in optimizer.param_groups
        for weight in group["params"]
        for part, tensor in _state_of(weight, group, optimizer).items()
    }


def _state_of(weight: nn.Parameter, group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of a weight, initialized as in `torch.optim.AdamW` if there is none."""
    state: dict[str, Tensor] = optimizer.state[weight]
    if not state and isinstance(optimizer, SmallStateAdamW):
        state.update(optimizer.begin(weight))
    elif not state:
        counts_there = group.get("fused") or group.get("capturable")
        state["step"] = torch.zeros((), device=weight.device if counts_there else None)
        state |= {name: torch.zeros_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return state


@contextmanager
def _explained(what: str, folder: Path, remedy: str) -> Generator[None, None, None]:
    """Convert torch's exceptions to CheckpointError, and silence its expected warnings."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # A single rank deliberately has no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(what, where=str(folder), why=_why(folder, _cause(error)), help=remedy) from error


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed: torch's own exception joins all tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


def _why(folder: Path, error: BaseException) -> str:
    if lacks_room(error):
        return write_fault(folder, error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
