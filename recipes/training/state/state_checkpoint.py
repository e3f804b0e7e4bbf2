"""Weights and optimizer on disk, in the format of torch.distributed.checkpoint.

Every rank writes its shards. Any number of ranks reads them again, because what is stored is whole tensors by name.
They are read as data (`recipes.training.reading`): torch's own reader would execute what a checkpoint says.
That module takes a second to import, which the first checkpoint spends and not the start of every run.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from recipes.training.optim.small_moments import SmallStateAdamW
from recipes.training.reading.adapter_names import beneath_adapters, new_adapters
from rlinf_core import CheckpointError
from rlinf_core.foreign.write_fault import lacks_room, write_fault

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from recipes.training.reading.checkpoints import CheckpointReader

ACTOR: Final = "actor"


def save(
    folder: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    version: int,
    component: str = ACTOR,
    *,
    frozen: bool = False,
) -> None:
    """Write `folder/actor`, or the folder of another component; all ranks of it call it.

    Args:
        folder: the folder of the checkpoint.
        policy: its weights.
        optimizer: the optimizer of the weights.
        version: the version of the weights.
        component: see above.
        frozen: weights that are not trained are written, too: without them they have to be what the model is built
            with, as those of a folder of HuggingFace are.

    Raises:
        CheckpointError: it cannot be written.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _complete(optimizer)
    model, state = get_state_dict(policy, optimizer, options=_options(frozen=frozen))
    with _explained("the checkpoint's weights cannot be written", folder, "free disk space, or name another folder"):
        state_dict_saver.save(
            {"model": model, "optimizer": state, "version": version},
            checkpoint_id=folder / component,
            no_dist=not dist.is_initialized(),
        )


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, component: str = ACTOR) -> int:
    """Read `folder/actor`, or the folder of another component, in place; all ranks of it call it.

    Returns:
        The version of the weights.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    options = _options(frozen=True)
    model, state = get_state_dict(policy, optimizer, options=options)
    sizes = "the model must have the same sizes as when saved; `config.yaml` beside the checkpoints records them"
    with _explained("the checkpoint's weights cannot be read", folder, sizes):
        reader = _reader(folder / component)
        kept = {mine: model[mine] for mine in _stored_names(reader, policy, model)}
        stored: dict[str, Any] = {"model": kept, "optimizer": state, "version": 0}
        _read(stored, reader)
    settings = [dict(group) for group in optimizer.param_groups]
    set_state_dict(
        policy, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"], options=options
    )
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        # torch forgets those of a group without weights, as critics have one beside that of values.
        if not group["params"]:
            group.clear()
            group.update(before)
    return int(stored["version"])


def load_weights(folder: Path, policy: nn.Module, component: str = ACTOR) -> None:
    """Read the weights alone of `folder/actor`, in place; all ranks of the component call it.

    A weight that is not trained may be missing: it is what the model was built with. Weights that had no adapters are
    read beneath new ones, which stay as they were made.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    fits = "both `actor.model` sections must agree; `config.yaml` beside the checkpoints records the checkpoint's"
    with _explained("the checkpoint's weights cannot be read", folder, fits):
        state: dict[str, Any] = policy.state_dict()
        reader = _reader(folder / component)
        names = _stored_names(reader, policy, state)
        stored = {theirs: state[mine] for mine, theirs in names.items()}
        _read({"model": stored}, reader)
        policy.load_state_dict({mine: stored[theirs] for mine, theirs in names.items()}, strict=False)


def _reader(folder: Path) -> CheckpointReader:
    """Return a reader of a component's folder, which executes nothing of it."""
    from recipes.training.reading.checkpoints import CheckpointReader

    return CheckpointReader(folder)


def _read(stored: dict[str, Any], reader: CheckpointReader) -> None:
    """Read tensors in place and other values by name; all ranks call it."""
    from torch.distributed.checkpoint import state_dict_loader

    from recipes.training.reading.checkpoints import CheckpointPlanner

    state_dict_loader.load(
        stored, storage_reader=reader, planner=CheckpointPlanner(), no_dist=not dist.is_initialized()
    )


def _stored_names(reader: CheckpointReader, policy: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return which weights of a policy a checkpoint holds, each with its name there.

    Raises:
        ValueError: it lacks one that is trained.
    """
    metadata = reader.metadata.state_dict_metadata
    names = beneath_adapters(state, {name.removeprefix("model.") for name in metadata if name.startswith("model.")})
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    missing = sorted(name for name in trained - set(names) if name not in new_adapters(state, names.values()))
    if missing:
        raise ValueError(f"the checkpoint has no weight `{missing[0]}`")
    return names


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the optimizer state of weights that no loss has reached yet, such as values in imitation.

    Who reads the checkpoint has a state of every weight, and looks for each.
    """
    states: list[dict[str, torch.Tensor]] = list(optimizer.state.values())
    for weight in [parameter for group in optimizer.param_groups for parameter in group["params"]] if states else ():
        if optimizer.state[weight]:
            continue
        if isinstance(optimizer, SmallStateAdamW):
            optimizer.state[weight] = optimizer.begin(weight)
        else:
            # Steps are counted by a number, the rest is of the weight's shape.
            optimizer.state[weight] = {
                name: torch.zeros_like(weight if value.dim() else value, dtype=value.dtype)
                for name, value in states[0].items()
            }


def _options(*, frozen: bool) -> StateDictOptions:
    """Return which weights are saved: the trained ones, and optionally the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=not frozen, strict=False)


@contextmanager
def _explained(what: str, folder: Path, remedy: str) -> Generator[None, None, None]:
    """Convert torch's exceptions to CheckpointError, and silence its expected warnings."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # One rank needs no process group, and that is said on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
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
