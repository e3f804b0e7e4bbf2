"""The worker groups that end with the worker that launched them. Channels belong to the job and go with nobody."""

from __future__ import annotations


class Ownership:
    """The groups of a job, each with the worker or driver that launched it."""

    def __init__(self) -> None:
        # In the order of their launch.
        self._owners: dict[str, str] = {}

    def claim(self, group: str, owner: str) -> None:
        """Record that `owner` has launched a group, whoever did before."""
        self._owners.pop(group, None)
        self._owners[group] = owner

    def release(self, group: str) -> None:
        """Forget a group that was shut down."""
        self._owners.pop(group, None)

    def gone(self, owner: str) -> tuple[str, ...]:
        """Return the groups to end after a worker has died, and forget them: the youngest first, so inner before outer.

        These are the groups that it launched, and those that their workers launched in turn.
        """
        doomed: set[str] = set()
        parents = [owner]
        while parents:
            parent = parents.pop()
            found = {
                group for group, by in self._owners.items() if by == parent or by.startswith(f"{parent}:")
            } - doomed
            doomed |= found
            parents += found
        order = tuple(group for group in reversed(self._owners) if group in doomed)
        for group in order:
            del self._owners[group]
        return order
