"""The processes of a running job as a table, and as the contract `rlinf.workers/1`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlinf_cli.console import console
from rlinf_core.supervision.job_view import JobSnapshot, WorkerView, views
from rlinf_core.waiting import spell_seconds

SCHEMA = "rlinf.workers/1"


def workers_record(job: JobSnapshot, names: Collection[str]) -> dict[str, Any]:
    """Return `since` is in seconds up to now; `waits_for` holds addresses and, as `channel NAME`, channels."""
    return {
        "schema": SCHEMA,
        "job": job.job,
        "workers": [
            {
                "name": worker.name,
                "node": worker.node,
                "node_rank": worker.node_rank,
                "pid": worker.pid,
                "device": worker.device or "cpu",
                "state": worker.state,
                "doing": worker.doing,
                "since": None if worker.since is None else round(worker.since, 3),
                "waits_for": list(worker.waits_for),
                "stacks": worker.stacks,
            }
            for worker in views(job)
            if worker.name in names
        ],
    }


def workers_text(job: JobSnapshot, names: Collection[str]) -> str:
    """Return a line for each process of these names."""
    rows = [_row(worker) for worker in views(job) if worker.name in names]
    table = console.table(["WORKER", "NODE", "PID", "DEVICE", "SINCE", "DOES"], rows, right=(2, 4))
    return f"job {job.job}\n{table}"


def _row(worker: WorkerView) -> list[str]:
    return [
        worker.name,
        "" if worker.node_rank is None else str(worker.node_rank),
        "" if worker.pid is None else str(worker.pid),
        worker.device or "cpu",
        "" if worker.since is None else spell_seconds(worker.since),
        _does(worker),
    ]


def _does(worker: WorkerView) -> str:
    """Return the activity, with the awaited peers unless it names them already."""
    unnamed = [name for name in worker.waits_for if name.removeprefix("channel ") not in worker.doing]
    if not unnamed:
        return worker.doing
    listed = ", ".join(unnamed[:3]) + (f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else "")
    return f"{worker.doing} ({listed})"
