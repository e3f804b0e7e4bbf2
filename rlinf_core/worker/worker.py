"""The base class of users' workers, and references to worker classes by name."""

from __future__ import annotations

import inspect
import logging
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import checked_bound
from rlinf_core.cluster.membership import free_port
from rlinf_core.context import WorkerContext, WorkerInfo
from rlinf_core.errors import InvalidNameError, RuntimeFailure
from rlinf_core.hardware.accelerators import get_accelerator
from rlinf_core.hardware.robots import RobotUnit
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.timer import caller_of, timer

if TYPE_CHECKING:
    import torch

    from rlinf_core.worker.worker_group import WorkerGroup


P = TypeVar("P", covariant=True)


class WorkerReference(Generic[P]):
    """A reference to a worker class, to create groups without importing it.

    So a driver that does not compute starts without torch, which only its workers import.

    Args:
        path: the path of the class, `package.module:Class`.
        methods: the protocol of the methods called on the group; the class implements it.
        config_section: the class's section of the configuration, see `Worker.config_section`.
        forked: whether its processes are forked, see `Worker.forked`.
    """

    def __init__(self, path: str, methods: Any, config_section: str | None = None, *, forked: bool = False) -> None:
        self._path = path
        self.forked = forked
        # The module of the class: forked processes share its imports.
        self.__module__ = path.partition(":")[0]
        self.config_section = config_section
        self.__name__ = path.rpartition(":")[2]
        bases = cast("tuple[type, ...]", methods.__mro__)
        self._public: frozenset[str] = frozenset(
            name for base in bases for name, value in vars(base).items() if _is_public(name, value)
        )

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Return how to unpickle this reference: as the class itself."""
        return _class_at, (self._path,)

    def create_group(self, *args: Any, **kwargs: Any) -> WorkerGroup[P]:
        """Return a group of the class, not yet launched; the arguments are for its constructor."""
        from rlinf_core.worker.worker_group import WorkerGroup

        return WorkerGroup[P](cast("type[P]", self), args, kwargs)

    def _rlinf_methods(self) -> frozenset[str]:
        return self._public


def _is_public(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_")


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_LOGGER = logging.getLogger("rlinf.worker")


class Worker(Communication):
    """One process of a worker group.

    A subclass is an ordinary class. Its public methods become methods of the group that `create_group` returns. In its
    own process `self` has a rank, peers and a device even before the constructor runs.
    """

    # Names `_rlinf...` belong to the runtime; all others, except those below, are free for subclasses.
    _rlinf_bound: WorkerContext | None = None

    # `@Worker.timer("train_step")` times every call of a method under that tag.
    timer = timer

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup[Self]:
        """Return a group of this class, not yet launched; the arguments are for its constructor.

        Raises:
            InvalidNameError: a public method of the class has a name that groups or workers reserve.
        """
        from rlinf_core.worker.worker_group import WorkerGroup

        return WorkerGroup(cls, args, kwargs)

    @classmethod
    def _rlinf_methods(cls) -> frozenset[str]:
        """Return the names of the public methods that the user's classes, not `Worker` itself, define.

        Raises:
            InvalidNameError: one of them would replace a method of `Worker`.
        """
        for base in takewhile(lambda base: base is not Worker, cls.__mro__):
            replaced = sorted(
                name
                for name in _OWN_METHODS & vars(base).keys()
                if callable(getattr(base, name)) or callable(getattr(Worker, name))
            )
            if replaced:
                raise InvalidNameError(
                    f"`{base.__name__}.{replaced[0]}` cannot be called on a group",
                    why=f"it would replace the `{replaced[0]}` of every worker",
                    help="rename the method",
                )
        free = {name for name in _FREE_NAMES if getattr(cls, name) is not getattr(Worker, name)}
        inherited = set(dir(Worker)) - free
        names = (name for name in dir(cls) if not name.startswith("_") and name not in inherited)
        return frozenset(name for name in names if callable(getattr(cls, name)))

    def _rlinf_bind(self, context: WorkerContext) -> None:
        """Set the worker's context; called before its constructor."""
        self._rlinf_bound = context

    def _close(self) -> None:
        """Release the worker's resources; called before its process ends."""

    @property
    def _rlinf_context(self) -> WorkerContext:
        if self._rlinf_bound is None:
            raise RuntimeFailure(
                f"this `{type(self).__name__}` is not a process of a group",
                why="it was created by calling its class",
                help=f"launch it: `{type(self).__name__}.create_group(...).launch(cluster)`",
            )
        return self._rlinf_bound

    @property
    def _rank(self) -> int:
        """This worker's rank within its group."""
        return self._rlinf_context.placement.rank

    @property
    def _world_size(self) -> int:
        """The number of workers in the group."""
        return self._rlinf_context.placement.world_size

    # Cached properties are assignable, so that a subclass may use these names for its own values.

    @cached_property
    def rank(self) -> int:
        """This worker's rank within its group."""
        return self._rank

    @cached_property
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self._world_size

    @cached_property
    def _group_name(self) -> str:
        """The name of this worker's group, by which peers address it."""
        return self._rlinf_context.group_name

    @cached_property
    def has_accelerator(self) -> bool:
        """Whether an accelerator is assigned to this worker."""
        return self._rlinf_context.placement.local_accelerator_rank is not None

    @cached_property
    def hardware_infos(self) -> tuple[RobotUnit, ...]:
        """The robots or other declared units that this worker owns, as `worker_info.hardware`."""
        return self._rlinf_context.hardware

    def acquire_free_port(self) -> int:
        """Return a TCP port of this worker's node that is free now."""
        return free_port()

    @property
    def worker_address(self) -> WorkerAddress:
        """This worker's name among all workers of the job."""
        return self._rlinf_context.address

    @cached_property
    def worker_info(self) -> WorkerInfo:
        """The node and the devices of this worker."""
        return self._rlinf_context.info()

    @cached_property
    def torch_device(self) -> torch.device:
        """The torch device of this worker. Imports torch.

        It is the worker's first assigned accelerator. A worker placed on a robot or a node has none: it uses one of
        its node's accelerators, by its local rank, if this torch supports them, else the CPU.
        """
        import torch

        placement = self._rlinf_context.placement
        if placement.accelerator_type is None or not placement.visible_accelerators:
            return torch.device("cpu")
        kind = get_accelerator(placement.accelerator_type).torch_device
        if kind == "cpu":
            # Without an index: CPU tensors have none, so `to("cpu:0")` would copy them each time.
            return torch.device(kind)
        if placement.local_accelerator_rank is None:
            module: Any = getattr(torch, kind, None)
            usable: int = module.device_count() if module is not None else 0
            return torch.device(kind, placement.local_rank % usable) if usable else torch.device("cpu")
        # Under isolation the process sees only its own devices, so the first one is device 0.
        index = 0 if placement.isolate_accelerator else placement.local_accelerator_rank
        return torch.device(kind, index)

    def create_channel(
        self,
        channel_name: str | None = None,
        node_id: int | None = None,
        maxsize: int = 0,
        group_affinity: str | None = None,
        group_rank_affinity: int | None = None,
        *,
        name: str | None = None,
    ) -> Channel:
        """Return a new channel, which lives until the job ends or it is closed and drained.

        Args:
            channel_name: the name to connect to; its process has the address `channel_name:0`.
            node_id: the rank of its node.
            name: an alias of `channel_name`, as in `Channel.create`.
            maxsize: the capacity of each key, beyond which puts wait; 0 means unlimited.
            group_affinity: the group beside which it is placed; by default, without `node_id`, this worker's group.
            group_rank_affinity: the rank in that group on whose node it is placed; by default this worker's rank in its
                own group, and 0 in another one.

        Raises:
            InvalidNameError: the name is invalid or taken.
            ClusterError: there is no such node, or the channel's process does not start.
            UnknownGroupError: there is no such group.
            ValueError: `maxsize` is not an integer >= 0, or both a node and an affinity are given.
            TypeError: the name is missing, or given twice.
        """
        from rlinf_core.channel import launch

        channel_name = _one_name(channel_name, name)
        if node_id is not None and (group_affinity is not None or group_rank_affinity is not None):
            raise ValueError("a channel is placed on a node or beside a group: give `node_id` or an affinity, not both")
        context = self._rlinf_context
        if node_id is not None:
            return Channel.create(channel_name, maxsize, node_id)
        own = group_affinity is None or group_affinity == context.group_name
        rank = group_rank_affinity if group_rank_affinity is not None else self._rank if own else 0
        group = context.group_name if group_affinity is None else group_affinity
        if own and rank == self._rank:
            place = launch.own_node(context.placement.cluster_node_rank, context.node_ip)
        else:
            place = WorkerAddress.from_name(group).get_child_address(rank)
        return Channel(channel_name, launch.create(channel_name, checked_bound(maxsize), place))

    def connect_channel(self, channel_name: str | None = None, *, name: str | None = None) -> Channel:
        """Return the channel of this name, waiting up to `RLINF_CONNECT_TIMEOUT` while it may still be created.

        Raises:
            UnknownGroupError: the job declared its groups and channels, and this is not one of them.
            PeerNotFoundError: it was not created in time.
            TypeError: no name is given, or two.
        """
        return Channel.connect(_one_name(channel_name, name))

    def log_debug(self, message: str, *args: object) -> None:
        """Log a line of detail, under this worker's address; `args` as in `logging`."""
        _LOGGER.debug(message, *args)

    def log_info(self, message: str, *args: object) -> None:
        """Log a line, under this worker's address; `args` as in `logging`."""
        _LOGGER.info(message, *args)

    def log_on_first_rank(self, message: str, *args: object) -> None:
        """Log a line as `log_info` does, on rank 0 of the group only."""
        if self._rank == 0:
            _LOGGER.info(message, *args)

    def log_warning(self, message: str, *args: object) -> None:
        """Log a warning, under this worker's address; `args` as in `logging`."""
        _LOGGER.warning(message, *args)

    def log_error(self, message: str, *args: object) -> None:
        """Log an error, under this worker's address; `args` as in `logging`."""
        _LOGGER.error(message, *args)

    def worker_timer(self, tag: str | None = None, rows: int = 0) -> timer:
        """Time a block in seconds: `with self.worker_timer("train_step"): ...`; by default under the method's name.

        The handle of the enclosing call returns the durations. With `rows`, the size of the work, `profile.json` of the
        run shows how the duration depends on it.
        """
        return timer(tag if tag is not None else caller_of(inspect.currentframe()), rows)


# Names of conveniences on which the runtime does not rely: a class may redefine them.
_FREE_NAMES = frozenset(
    {
        "acquire_free_port",
        "hardware_infos",
        "has_accelerator",
        "log_on_first_rank",
        "rank",
        "recv_from",
        "send_to",
    }
)
# The reserved names of every worker. `create_group` does not run in workers: a class may extend it.
_OWN_METHODS = {name for name in dir(Worker) if not name.startswith("_")} - {"create_group"} - _FREE_NAMES


def _one_name(channel_name: str | None, name: str | None) -> str:
    """Return the name of a channel, from `channel_name` or its alias `name`."""
    if (channel_name is None) is (name is None):
        raise TypeError("a channel has one name: write `self.create_channel(NAME)` in a worker, else `Channel.create`")
    return cast("str", name if channel_name is None else channel_name)
