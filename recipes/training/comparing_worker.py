"""Workers that check data from outside, and how a runner collects their results."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol

from rlinf_core import Worker
from rlinf_core.runners.storage.first_contact import ContactCheck, FirstContact
from rlinf_core.worker.handle import wait_together


class ComparingWorker(Worker):
    """A worker that collects its comparisons for the runner; its configuration is `_config`."""

    _config: Any

    @cached_property
    def _contact(self) -> FirstContact:
        return FirstContact(self.config_section or "", skips=getattr(self._config.runner, "skip_checks", False))

    def compared(self) -> list[ContactCheck]:
        """Return the comparisons since the last call."""
        return self._contact.take()


class Comparing(Protocol):
    """The methods of a worker that compares."""

    def compared(self) -> list[ContactCheck]: ...


def comparisons_of(groups: Iterable[Any]) -> list[ContactCheck]:
    """Return the comparisons that the workers of groups have made since the last call; some groups never compare."""
    asked = [group.compared() for group in groups if hasattr(group, "compared")]
    by_group: list[list[list[ContactCheck]]] = wait_together(*asked)
    return [check for ranks in by_group for checks in ranks for check in checks]
