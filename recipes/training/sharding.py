"""Parallel strategies of training: one process, replicas, or shards (FSDP2), and how the ranks of a group meet.

Importing torch's FSDP2 takes a second, so only code that shards imports it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistStoreError, FileStore, Store  # pyright: ignore[reportPrivateImportUsage] - public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.sections.actor import FsdpConfig
from recipes.training.typed_tensors import DTYPES, is_shard
from recipes.training.weight_sources import WeightSource, fill_weights
from recipes.training.without_memory import move_what_has_memory
from rlinf_core import CommunicationTimeoutError, env_vars
from rlinf_core.cluster.engine import base_folder
from rlinf_core.supervision.client import ManagerClient, current_client

# How many squares float32 adds up within 3e-7.
_PIECE: Final = 1 << 16


class ParallelStrategy:
    """The weights of one rank, and the collective operations of all ranks.

    With FSDP2 a rank holds a shard of each weight, gradient and optimizer state. Each backward pass sums gradients over
    ranks, after which a rank keeps only the gradients of its shard.

    Attributes:
        module: the policy to call in training.
        world_size: number of ranks that train together.
        rank: the rank of this process.
    """

    def __init__(self, module: nn.Module, world_size: int = 1, rank: int = 0) -> None:
        self.module = module
        self.world_size = world_size
        self.rank = rank

    def reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        if self.world_size == 1:
            return value
        summed = value.clone()
        dist.all_reduce(summed)
        return summed

    def reduce_max(self, number: int) -> int:
        """Return the maximum of a number over all ranks."""
        if self.world_size == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def finish_gradients(self) -> None:
        """Average the gradients over all ranks, after the last backward pass of a batch."""

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of all ranks together, a scalar."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        shards = [gradient for gradient in gradients if is_shard(gradient)]
        # With `cpu_offload` shards are on the CPU.
        device = next((gradient.device for gradient in (*shards, *gradients)), torch.device("cpu"))
        square = _square([gradient.to_local() for gradient in shards], device)
        if shards:
            mesh = shards[0].device_mesh
            for dim, placement in enumerate(shards[0].placements):
                if placement.is_shard() and mesh.size(dim) > 1:
                    dist.all_reduce(square, group=mesh.get_group(dim))
        whole = _square([gradient for gradient in gradients if not is_shard(gradient)], device)
        return (square + whole).sqrt().float()

    def clip_gradients(self, largest: float, norm: Tensor) -> None:
        """Scale gradients of the given norm to at most `largest`; with `largest` 0, do nothing."""
        if largest:
            nn.utils.clip_grads_with_norm_(self.module.parameters(), largest, norm)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of a sharded weight. Collective: all ranks pass the same weights in the same order."""
        tensor = tensor.detach()
        return tensor.full_tensor() if is_shard(tensor) else tensor


class Replicated(ParallelStrategy):
    """All weights on every rank, with averaged gradients: `sharding_strategy: no_shard`.

    Args:
        module: see `ParallelStrategy`.
        world_size: see `ParallelStrategy`.
        rank: see `ParallelStrategy`.
        reduce_type: dtype in which gradients are summed; None: their own.
    """

    def __init__(
        self, module: nn.Module, world_size: int, rank: int = 0, reduce_type: torch.dtype | None = None
    ) -> None:
        super().__init__(module, world_size, rank)
        self._reduce_type = reduce_type

    def finish_gradients(self) -> None:
        """See `ParallelStrategy`; all gradients travel in one message."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = flat if self._reduce_type is None else flat.to(self._reduce_type)
        dist.all_reduce(flat)
        flat /= self.world_size
        for gradient, part in zip(
            gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))


def is_sharded(fsdp: FsdpConfig, world_size: int, compute_dtype: torch.dtype | None) -> bool:
    """Return whether `parallelize` shards weights, or computes with copies of them."""
    return compute_dtype is not None or (world_size > 1 and fsdp.sharding_strategy != "no_shard")


def parallelize(
    module: nn.Module,
    rank: int,
    world_size: int,
    fsdp: FsdpConfig,
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    methods: Sequence[str] = (),
    *,
    compute_dtype: torch.dtype | None = None,
    exact: Sequence[nn.Module] = (),
    initial: WeightSource | None = None,
) -> ParallelStrategy:
    """Return the strategy of `actor.fsdp_config` for a module with equal weights on every rank.

    Args:
        module: the module, on its training device; with `initial` its parameters may have no memory.
        rank: the rank of this process.
        world_size: number of ranks.
        fsdp: how weights are distributed over ranks.
        device: the device that computes.
        blocks: parts of the module, such as the layers of a transformer, whose shards are gathered one at a time.
        methods: names of methods that, like `forward`, compute with the weights and must gather them.
        compute_dtype: dtype that layers compute in, with copies of the weights, which keep their own dtype. This
            requires FSDP2 even for one rank or for replicas, which are shards over a single rank; gradients are summed
            in `mixed_precision.reduce_dtype`, or in float32. None: `mixed_precision.param_dtype`, over several ranks.
        exact: the `blocks` that compute in the dtype of their weights.
        initial: the source of parameters without memory; each rank reads the values of its shard.
    """
    if world_size > 1 or compute_dtype is not None:
        join_ranks(rank, world_size, device)
    if not is_sharded(fsdp, world_size, compute_dtype):
        if world_size == 1:
            return ParallelStrategy(module)
        types = fsdp.mixed_precision
        reduced = types.reduce_dtype or types.computing
        return Replicated(module, world_size, rank, DTYPES[reduced] if reduced else None)
    from torch.distributed.fsdp import register_fsdp_forward_method

    if initial is not None:
        move_what_has_memory(module, device)
    _shard(module, world_size, fsdp, device, blocks, compute_dtype, exact)
    if initial is not None:
        fill_weights(module, initial, torch.device("cpu") if _offloads(fsdp, device) else device)
    for method in methods:
        register_fsdp_forward_method(module, method)
    return ParallelStrategy(module, world_size, rank)


def _shard(
    module: nn.Module,
    world_size: int,
    fsdp: FsdpConfig,
    device: torch.device,
    blocks: Sequence[nn.Module],
    compute_dtype: torch.dtype | None,
    exact: Sequence[nn.Module],
) -> None:
    """Apply FSDP2 to a module in place; see `parallelize`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    types = fsdp.mixed_precision
    reduce_dtype = DTYPES[types.reduce_dtype] if types.reduce_dtype else None
    if compute_dtype is not None:
        reduce_dtype = reduce_dtype or torch.float32
    elif types.computing is not None:
        compute_dtype = DTYPES[types.computing]
    # Inputs of `forward` keep their dtype: rounding actions to half the bits would change them.
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    reshard = fsdp.sharding_strategy == "full_shard"
    mesh = _mesh(device, world_size, replicas=fsdp.sharding_strategy == "no_shard")
    offload = CPUOffloadPolicy() if _offloads(fsdp, device) else OffloadPolicy()
    for part in (*blocks, module):
        policy = plain if any(part is kept for kept in exact) else mixed
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)


def _offloads(fsdp: FsdpConfig, device: torch.device) -> bool:
    return fsdp.cpu_offload and device.type != "cpu"


def _mesh(device: torch.device, world_size: int, *, replicas: bool) -> DeviceMesh:
    """Return the mesh of ranks that weights are sharded over; a replica is sharded over its own rank alone."""
    if replicas:
        return init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (world_size,))


def join_ranks(rank: int, world_size: int, device: torch.device) -> None:
    """Join the process group of all ranks of this worker's group."""
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if world_size == 1:
        # A single rank has no other rank to meet.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, and left out of a list
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    seconds = env_vars.TIMEOUT.get()
    store = _open_rank_store(world_size, seconds)
    _bind_gloo(store, rank, world_size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


_norms = cast("Callable[[Tensor], Tensor]", partial(cast("Any", torch.linalg).vector_norm, dim=1, dtype=torch.float32))


def _square(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of gradients, a float64 scalar on a device.

    On a CPU torch adds up the squares of a tensor sequentially in float32: for 16 million numbers the norm is 1e-3 too
    small, and the error depends on the number of ranks. Norms of pieces are therefore added up in float64.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    rest: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        end = flat.numel() // _PIECE * _PIECE
        if end:
            norms.append(_norms(flat[:end].view(-1, _PIECE)).to(device, torch.float64))
        rest.append(flat[end:])
    norms.append(nn.utils.get_total_norm(rest).to(device, torch.float64)[None])
    return torch.cat(norms).square().sum()


_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE: Final = "lo"
_SIOCGIFADDR: Final = 0x8915
# Torch's groups hold only the C++ half of a store, which cannot call back once the Python half is collected.
_opened: list[Store] = []


def _open_rank_store(world_size: int, seconds: float) -> Store:
    """Return the store in which the ranks of this process's group meet; no other process can reach it.

    Without a job the store is a file of this user, for ranks that one process starts on one machine.

    Args:
        world_size: number of ranks.
        seconds: time limit of a wait for another rank.
    """
    client = current_client()
    if client is None:
        return FileStore(str(base_folder() / f"ranks-{int(os.environ['MASTER_PORT'])}-{os.getppid()}"), world_size)
    store = RankStore(client, seconds)
    _opened.append(store)
    return store


def _bind_gloo(store: Store, rank: int, world_size: int) -> None:
    """Have gloo listen on loopback if all ranks are on one machine, else on the interface of the data plane.

    `GLOO_SOCKET_IFNAME` of the job file has precedence. Collective.
    """
    client = current_client()
    interface = _LOOPBACK_INTERFACE
    if client is not None:
        info = client.endpoint.info
        store.set(f"machine/{rank}", str(info.place))
        machines = {store.get(f"machine/{other}") for other in range(world_size)}
        if len(machines) > 1:
            interface = _interface_of(info.tcp_host)
    if interface is not None:
        os.environ.setdefault(_GLOO_INTERFACE, interface)


def _interface_of(address: str) -> str | None:
    """Return the interface with this IPv4 address; None if no interface has it, as behind NAT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class RankStore(Store):
    """The store of this process's group, in the job's manager. Torch calls it from any thread.

    Torch's own store listens on every address without authentication; each rank reaches the manager over the data
    plane.

    Args:
        client: the connection to the job's manager.
        seconds: time limit of a wait for another rank.
    """

    def __init__(self, client: ManagerClient, seconds: float) -> None:
        super().__init__()
        self._client = client
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._write(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is stored."""
        (value,) = self._wait_for([key], self._seconds)
        return value

    def add(self, key: str, value: int) -> int:
        """Add `value` to a number, and return the sum."""
        return int(self._write(key, value) or 0)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return None not in self._client.read_store(keys, self._seconds, wait=False)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values."""
        self._wait_for(keys, self._seconds if timeout is None else timeout.total_seconds())

    # torch's C++ code calls methods of these names.

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Remove a value; return whether there was one."""
        return self._write(key, None) is not None

    def clone(self) -> RankStore:
        """Return this store, which any thread can use."""
        return self

    def _write(self, key: str, value: bytes | int | None) -> bytes | None:
        return self._client.write_store(key, value, self._seconds)

    def _wait_for(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        try:
            values = self._client.read_store(keys, seconds, wait=True)
        except CommunicationTimeoutError:
            # Torch's barriers wait in short steps, and take only this error as the end of a step.
            raise DistStoreError(
                f"`{self._client.me}` has waited {seconds:g} s for another rank of its group to store {', '.join(keys)}"
            ) from None
        return cast("tuple[bytes, ...]", values)
