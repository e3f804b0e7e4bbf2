"""Ownership beyond a process's own memory, and what has to be released when an owner is gone.

Owners form a tree: the driver owns the groups that it launches, a group's workers own what they launch in turn. Files,
sockets and segments die with the process that owns them; channels do not: they belong to the job, so that they
outlive the worker that created them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ResourceKind(StrEnum):
    """The kind of a possession, in the order of release: users of a thing go before the thing."""

    GROUP = "group"
    CHANNEL = "channel"
    SOCKET = "socket"
    SEGMENT = "segment"
    FILE = "file"


_ORDER = {kind: place for place, kind in enumerate(ResourceKind)}


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that stays behind unless it is released.

    Attributes:
        kind: what it is.
        name: which one: a group's or channel's name, or a path.
        node: the node rank where it is, or None where that does not matter.
    """

    kind: ResourceKind
    name: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: str
    serial: int


class Ownership:
    """All that is owned in one job.

    Args:
        driver: the name of the owner that the job belongs to.
    """

    def __init__(self, driver: str = "driver") -> None:
        self._driver = driver
        self._claims: dict[Resource, _Claim] = {}
        self._serial = 0

    def claim(self, resource: Resource, owner: str) -> None:
        """`owner` is responsible for a resource from now on, whoever was before; a channel is the driver's."""
        self._serial += 1
        owner = self._driver if resource.kind is ResourceKind.CHANNEL else owner
        self._claims[resource] = _Claim(owner, self._serial)

    def release(self, resource: Resource) -> bool:
        """Return a resource is gone; False when it was nobody's."""
        return self._claims.pop(resource, None) is not None

    def owner(self, resource: Resource) -> str | None:
        """Return the owner, or None."""
        claim = self._claims.get(resource)
        return claim.owner if claim else None

    def owned_by(self, owner: str) -> tuple[Resource, ...]:
        """Return what an owner has claimed itself, oldest first."""
        claims = sorted((claim.serial, resource) for resource, claim in self._claims.items() if claim.owner == owner)
        return tuple(resource for _, resource in claims)

    def gone(self, owner: str, members: tuple[str, ...] = ()) -> tuple[Resource, ...]:
        """Return an owner died or left: what there is to release, in order, and no longer anybody's.

        With it goes what its groups own, and what the groups that their workers launched own. Groups come before what
        their workers may still use, inner groups before outer ones. When the driver is gone, everything is.

        Args:
            owner: a worker's address, a group's name, or the driver.
            members: further owners that went at the same time, such as the workers of a group that is shut down.
        """
        if self._driver in (owner, *members):
            doomed = list(self._claims)
        else:
            names = (owner, *members)
            doomed = [resource for resource, claim in self._claims.items() if _within(claim.owner, names)]
            # A nested group's name starts with its parent's address; one with a name of its own is found by its owner.
            doomed += self._groups_below(doomed)
        order = sorted(dict.fromkeys(doomed), key=lambda one: (_ORDER[one.kind], -self._claims[one].serial))
        for resource in order:
            del self._claims[resource]
        return tuple(order)

    def _groups_below(self, doomed: list[Resource]) -> list[Resource]:
        """Return what belongs to the workers of groups that go."""
        found: list[Resource] = []
        todo = [resource.name for resource in doomed if resource.kind is ResourceKind.GROUP]
        seen = set(doomed)
        while todo:
            group = todo.pop()
            for resource, claim in self._claims.items():
                if resource not in seen and _within(claim.owner, (group,)):
                    seen.add(resource)
                    found.append(resource)
                    if resource.kind is ResourceKind.GROUP:
                        todo.append(resource.name)
        return found


def _within(owner: str, names: tuple[str, ...]) -> bool:
    return any(owner == name or owner.startswith(f"{name}:") for name in names)
