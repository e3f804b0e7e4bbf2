"""Waiting for several calls at once, with a Ray that answers at once."""

from __future__ import annotations

from typing import Any

import pytest
import ray.exceptions

from rlinf_core.address import WorkerAddress
from rlinf_core.failures import WorkerGroupError
from rlinf_core.worker.group import handle as module
from rlinf_core.worker.group.handle import GroupMember, WorkerGroupHandle, wait_together


class _Ray:
    """Results by reference: values, errors, or None while the call runs."""

    exceptions = ray.exceptions

    def __init__(self, **results: Any) -> None:
        self._results = results
        self.waited_in_vain = 0

    def wait(
        self, references: list[str], *, num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[str], list[str]]:
        ready = [reference for reference in references if self._results[reference] is not None]
        if timeout and len(ready) < num_returns:
            self.waited_in_vain += 1
        done = ready[:num_returns]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: str | list[str], timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(one) for one in reference]
        result = self._results[reference]
        if isinstance(result, Exception):
            raise result
        return result


def test_failure_of_one_call_ends_the_wait_for_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Ray(runs=None, fails=ray.exceptions.RayTaskError("step", "", ValueError("no such task")))
    monkeypatch.setattr(module, "ray_api", lambda: fake)
    member = GroupMember(WorkerAddress("env", (0,)), None, "node 0", 1)
    calls: list[WorkerGroupHandle[Any]] = [
        WorkerGroupHandle("env", "step", 1, [member], [name]) for name in ("runs", "fails")
    ]
    with pytest.raises(WorkerGroupError, match="no such task"):
        wait_together(*calls)
    assert fake.waited_in_vain == 0
