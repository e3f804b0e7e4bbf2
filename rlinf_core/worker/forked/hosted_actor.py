"""A forked process as its callers know it: in the place of an actor's handle."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import count
from typing import Any

from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.worker.forked.process_host import CallTurn


class HostHandle:
    """A host, and the names of those of its processes that this caller has not ended."""

    def __init__(self, actor: Any, names: Iterable[str]) -> None:
        self.actor = actor
        self.names = set(names)

    def end(self, name: str) -> None:
        """End a process; with the last one, the host."""
        self.names.discard(name)
        if self.names:
            self.actor.end.remote(name)
        else:
            ray_api().kill(self.actor)


class HostedActor:
    """The methods of one forked process, called as those of an actor: `actor.METHOD.remote(...)`."""

    def __init__(self, host: HostHandle, name: str) -> None:
        self._host, self._name = host, name
        self._caller, self._numbers = secrets.token_hex(8), count()

    def __getattr__(self, method: str) -> HostedMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostedMethod(self, method)

    def kill(self) -> None:
        """End the process, or one that has ended already."""
        self._host.end(self._name)

    def ended(self) -> Any:
        """Kill the process; return a reference to its having ended."""
        return self._host.actor.end.remote(self._name)

    def _call(self, method: str, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ray = ray_api()
        values = {position: value for position, value in enumerate(args) if isinstance(value, ray.ObjectRef)}
        positional = [None if position in values else value for position, value in enumerate(args)]
        pickled = ray.cloudpickle.dumps((positional, kwargs))
        # Numbered last: one that is never sent would be waited for.
        order = CallTurn(self._caller, next(self._numbers))
        carried = self._host.actor.call.options(name=task)
        return carried.remote(self._name, order, method, pickled, tuple(values), *values.values())


class HostedMethod:
    """A method of a forked process."""

    def __init__(self, actor: HostedActor, method: str, task: str = "") -> None:
        self._actor, self._method, self._task = actor, method, task or method

    def options(self, *, name: str) -> HostedMethod:
        """Return the method under another name of its task."""
        return HostedMethod(self._actor, self._method, name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; return Ray's reference to its result."""
        return self._actor._call(self._method, self._task, args, kwargs)  # pyright: ignore[reportPrivateUsage] - one of its own
