"""The plan of a group's launch: the name and the places of its workers, and their pickled class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from rlinf_core.address import WorkerAddress
from rlinf_core.arguments import as_index, short_repr
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.context import current_session
from rlinf_core.placement.strategy import PlacementStrategy
from rlinf_core.worker.calls import unpicklable
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.group.group_view import NO_PICKLE
from rlinf_core.worker.group.launch import Launch, Relaunch

# Positional and keyword arguments of a constructor.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class LaunchPlan:
    """The checked arguments of `WorkerGroup.launch`. It stays: single ranks are launched again by it.

    Attributes:
        base: the prefix of the workers' addresses.

    Raises:
        PlacementError: the cluster cannot hold the processes as asked.
        ValueError: `max_concurrency` is not an integer >= 1.
        PayloadError: the class or an argument does not pickle.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: type[Communication],
        arguments: Arguments,
        strategy: PlacementStrategy,
        name: str | None,
        isolate_accelerator: bool,
        max_concurrency: int | None,
    ) -> None:
        if max_concurrency is not None and (as_index(max_concurrency) or 0) < 1:
            raise ValueError(f"`max_concurrency` is {short_repr(max_concurrency)}, expected an integer >= 1")
        self.base = base_address(worker_class, arguments, name)
        self._cluster, self._max_concurrency = cluster, max_concurrency
        self._placements = strategy.get_placement(cluster, isolate_accelerator)
        try:
            self._pickled: bytes = ray_api().cloudpickle.dumps((worker_class, *arguments))
        except NO_PICKLE as error:
            raise unpicklable(f"`{worker_class.__name__}` or an argument of its constructor", error) from None
        # Those of its bases as well: of a class in the driver's script they are all that can be imported once.
        kinds = getattr(worker_class, "__mro__", (worker_class,)) if worker_class.forked else ()
        self._modules = tuple(dict.fromkeys(kind.__module__ for kind in kinds))

    def begin(self) -> Launch:
        """Begin the launch of all ranks."""
        return Launch(self._cluster, self.base, self._placements, self._pickled, self._max_concurrency, self._modules)

    def begin_again(self, rank: int) -> Launch:
        """Begin the launch of one rank in place of an earlier process."""
        (placement,) = (placement for placement in self._placements if placement.rank == rank)
        return Relaunch(self._cluster, self.base, [placement], self._pickled, self._max_concurrency, self._modules)


def base_address(worker_class: type[Communication], arguments: Arguments, name: str | None) -> WorkerAddress:
    """Return the prefix of the workers' addresses: a name, else the launching worker, if any."""
    name = name if name is not None else _configured_name(worker_class, arguments)
    if name is not None:
        return WorkerAddress(name)
    session = current_session()
    if session is not None and session.member is not None:
        return session.member
    return WorkerAddress(f"Worker_group_{worker_class.__name__}")


def _configured_name(worker_class: type[Communication], arguments: Arguments) -> str | None:
    """Return `group_name` of the class's section, from the first argument that has such a section."""
    section = worker_class.config_section
    if section is None:
        return None
    args, kwargs = arguments
    for argument in (*args, *kwargs.values()):
        name = _entry(_entry(argument, section), "group_name")
        if isinstance(name, str):
            return name
    return None


def _entry(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return cast("Mapping[str, Any]", config).get(name)
    return getattr(config, name, None)
