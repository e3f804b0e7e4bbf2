"""A worker class by name, for drivers that should not import its module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from rlinf_core.worker.group.worker_group import WorkerGroup

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
        from rlinf_core.worker.group.worker_group import WorkerGroup

        return WorkerGroup[P](cast("type[P]", self), args, kwargs)

    def _rlinf_methods(self) -> frozenset[str]:
        return self._public


def _is_public(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_")


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
