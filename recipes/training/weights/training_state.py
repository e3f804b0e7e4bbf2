"""The training state of one rank: a policy, its optimizer, and the version of its weights, in memory and on disk.

On disk are whole tensors by name, in safetensors files of torch.distributed.checkpoint. Every rank writes its shards,
and any number of ranks can read them. The optimizer's settings come from the job file, not from the checkpoint.
torch.distributed.checkpoint takes a second to import; only the first checkpoint pays for it, not the start of every
run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.optimizer import SmallStateAdamW, apply_settings, learning_rate_factor, make_optimizer, move_state
from recipes.training.sharding import is_sharded, parallelize
from recipes.training.tied_weights import beneath_adapters, new_adapters
from recipes.training.weight_sources import WeightSource
from recipes.training.weights.weight_sync import FlatWeights, GatheredWeights, SentWeights, own_weights
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import lacks_room, write_fault

if TYPE_CHECKING:
    from recipes.training.weights.shard_files import ShardReader


ACTOR: Final = "actor"
# Prefixes of names in the files: of weights, and of the optimizer's state of each weight; and the name of the version,
# an integer.
MODEL: Final = "model."
_OPTIMIZER: Final = "optimizer.state."
VERSION: Final = "version"
_UNREAD: Final = "the checkpoint's weights cannot be read"
_COPY: Final = "copy the checkpoint again from its source, or name another one"


_HOST: Final = torch.device("cpu")


class TrainingState:
    """A sharded policy with its optimizer.

    Args:
        policy: the policy, on its training device, with equal weights on every rank. Without shards its weights move
            into flat buffers.
        optim: settings of the optimizer.
        fsdp: how weights are distributed over ranks.
        rank: the rank of this process.
        world_size: number of ranks.
        device: the device that computes.
        blocks: parts of the policy whose shards are gathered one at a time.
        methods: methods of the policy that training calls besides `forward`.
        is_sent: selects by name the weights that `sent_weights` returns; None: all.
        component: names the folder in a checkpoint.
        compute_dtype: the type that layers compute in, with copies of the weights, and that `sent_weights` returns; see
            `parallelize`. None: the type of the weights.
        exact: the `blocks` that compute in the type of their weights.
        sent_types: types of the weights that `sent_weights` returns, by name; None: `compute_dtype`, or their own.
        saves_frozen: see `save`.
        initial: see `parallelize`.

    Attributes:
        policy: the policy.
        strategy: how the policy is distributed over ranks.
        optimizer: the optimizer of the policy's weights.
        version: the number of training steps that the weights have seen.
        written: fingerprints of the weights in the model folder that this rank wrote last, by name.
    """

    def __init__(
        self,
        policy: nn.Module,
        optim: OptimConfig,
        fsdp: FsdpConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        blocks: Sequence[nn.Module] = (),
        methods: Sequence[str] = (),
        is_sent: Callable[[str], bool] | None = None,
        component: str = ACTOR,
        compute_dtype: torch.dtype | None = None,
        exact: Sequence[nn.Module] = (),
        sent_types: Mapping[str, torch.dtype] | None = None,
        saves_frozen: bool = False,
        initial: WeightSource | None = None,
    ) -> None:
        self.policy = policy
        self._saves_frozen = saves_frozen
        self.version = 0
        self.written: Mapping[str, str] = {}
        self._optim = optim
        self._component = component
        self._device = self._place = device
        # Without shards, or if weights are sent in their own types, the policy's own memory is sent.
        gathers = is_sharded(fsdp, world_size, compute_dtype) or sent_types is not None
        self._flat = None if gathers else FlatWeights.adopt(policy, is_sent)
        self.strategy = parallelize(
            policy,
            rank,
            world_size,
            fsdp,
            device,
            blocks,
            methods,
            compute_dtype=compute_dtype,
            exact=exact,
            initial=initial,
        )
        self.optimizer = make_optimizer(policy, optim)
        self._sent = self._flat or GatheredWeights(
            lambda: own_weights(policy, is_sent), sent_types or compute_dtype, self.strategy.full_tensor, self.onloaded
        )

    def sent_weights(self) -> SentWeights:
        """Return the current weights for sending, gathered piece by piece during iteration.

        Without shards, and if weights are sent in their own types, the pieces share the policy's memory.
        """
        return self._sent

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all full weights by name, in their own types, one at a time. Collective over all ranks.

        Only rank 0 gets the values, on the host; they may share memory with the weights. On other ranks the tensors are
        empty.
        """
        with self.onloaded():
            state: dict[str, Tensor] = self.policy.state_dict()
            for name, value in state.items():
                full = self.strategy.full_tensor(value)
                yield name, full.to(_HOST) if self.strategy.rank == 0 else full.new_empty(0)
                del full

    def apply_settings(self, step: int, last_step: int | None) -> float:
        """Apply the optimizer settings of a training step, and return the learning rate."""
        apply_settings(self.optimizer, self._optim, learning_rate_factor(self._optim, step, last_step))
        return self.optimizer.param_groups[0]["lr"]

    def onload(self) -> None:
        """Move weights and optimizer back to their training device."""
        self._move(self._device)

    def offload(self, place: torch.device = _HOST) -> None:
        """Free device memory until `onload`: weights and optimizer move to the host, gradients are dropped.

        Nothing is lost, since every optimizer step begins without gradients. Checkpoints and whole weights remain
        available meanwhile.

        Args:
            place: the device for weights and optimizer.
        """
        self.optimizer.zero_grad()
        self._move(place)
        release_memory(self._device)

    @contextmanager
    def onloaded(self) -> Generator[None, None, None]:
        """Have weights and optimizer on their device in this block, and move them back afterwards."""
        place = self._place
        self._move(self._device)
        try:
            yield
        finally:
            self._move(place)

    def _move(self, place: torch.device) -> None:
        if place == self._place:
            return
        if self._flat is None:
            self.policy.to(place)
        else:
            self._flat.move(place)
        move_state(self.optimizer, place)
        self._place = place

    def save(self, folder: str) -> None:
        """Write weights and optimizer into a folder that all ranks share. Collective, with
        torch.distributed.checkpoint.

        Random numbers are a function of the step, so that no generator state is written.
        """
        with self.onloaded():
            save(
                Path(folder),
                self.policy,
                self.optimizer,
                self.version,
                self._component,
                frozen=self._saves_frozen,
            )

    def load(self, folder: str) -> None:
        """Read the state that `save` wrote, with any number of ranks.

        Raises:
            CheckpointError: the state cannot be read, or is of another model.
        """
        with self.onloaded():
            self.version = load(Path(folder), self.policy, self.optimizer, self._component)


def release_memory(device: torch.device) -> None:
    """Release the unused cached memory of a device to other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
        f"{_OPTIMIZER}{names[id(weight)]}.{part}": tensor
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
