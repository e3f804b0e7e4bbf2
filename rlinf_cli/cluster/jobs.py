"""The inspection of running jobs from outside: by the drivers' records, else by a cluster's Ray."""

from __future__ import annotations

import os
from typing import Self

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.driver_folder import JobRecord, running_jobs
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, RunError, RuntimeFailure
from rlinf_core.node import attach
from rlinf_core.node.stacks import ProcessStacks, StackRequest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.supervision.client import ManagerClient
from rlinf_core.supervision.job_view import JobSnapshot
from rlinf_core.supervision.lives import INSPECTOR, MANAGER

_SECONDS = 10.0


def find_job(name: str | None = None) -> JobRecord:
    """Return the running job of this name, or the newest job: of this machine's drivers, else of its cluster.

    Raises:
        ClusterError: no such job of this user runs here or on the known cluster.
    """
    jobs = running_jobs()
    if name is None or name not in [job.job for job in jobs]:
        has_cluster = env_vars.ADDRESS.get() not in (None, attach.LOCAL) or attach.known() is not None
        if has_cluster and (name is not None or not jobs):
            jobs += _jobs_of_cluster()
    if not jobs:
        raise ClusterError(
            "no job is running",
            where="this machine",
            why="none of your drivers has launched a group here or on a known cluster",
            help=f"run this on the machine of the job's driver, or set `{env_vars.ADDRESS.name}` to its cluster",
        )
    if name is None:
        return jobs[0]
    names = [job.job for job in jobs]
    if name not in names:
        raise ClusterError(
            f"no job named `{name}` is running", help=did_you_mean(name, names) or f"running: {quoted(names)}"
        )
    return jobs[names.index(name)]


def job_of(folder: RunFolder) -> JobRecord:
    """Return the job of an active run, found by its driver.

    Raises:
        RunError: the run is not active, its driver is not visible here, or it has launched nothing yet.
    """
    state = folder.state
    if not state.going_on:
        raise RunError(f"{folder.path.name} is not active: it is {state.outcome[0]}", where=str(folder.path))
    if not state.alive:
        raise RunError(
            "the run's driver cannot be seen from here",
            where=str(folder.path),
            why=f"its driver was {state.process}",
            help=f"run the same command on {state.process.host or 'the machine of the driver'}",
        )
    record = next((record for record in running_jobs() if record.pid == state.pid), None)
    if record is None:
        raise RunError(
            "the run has not launched any process yet",
            where=str(folder.path),
            why=f"process {state.pid}, its driver, has no job",
        )
    return record


def _jobs_of_cluster() -> list[JobRecord]:
    """Return the jobs on the known cluster, newest first, found by their manager actors."""
    joined = engine.connect(None, "rlinf-inspection", may_start=False)
    ray = ray_api()
    named = ray.util.list_named_actors(all_namespaces=True)
    spaces = [actor["namespace"] for actor in named if actor["name"] == MANAGER]
    records: list[JobRecord] = []
    for space in spaces:
        try:
            manager = ray.get_actor(MANAGER, namespace=space)
            job, secret, info, started = ray.get(manager.record.remote(), timeout=_SECONDS)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            continue  # it has just ended, or is not our manager
        records.append(JobRecord(job, secret, info, joined.address, info.pid, started))
    return sorted(records, key=lambda record: -record.started)


class Inspector:
    """A connection to the manager of a running job from outside the job."""

    def __init__(self, record: JobRecord) -> None:
        self._record = record
        session = Session(record.job, bytes.fromhex(record.secret))
        self._client = ManagerClient(session, record.manager, WorkerAddress(f"{INSPECTOR}-{os.getpid()}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close(linger=0.0)

    def snapshot(self, *, stacks: bool) -> JobSnapshot:
        """Return the current activity of each process of the job.

        Raises:
            ClusterError: the job does not answer.
        """
        try:
            return self._client.snapshot(stacks=stacks, seconds=_SECONDS)
        except RuntimeFailure as error:
            raise ClusterError(
                f"the job `{self._record.job}` does not answer",
                where=f"on the cluster at {self._record.address}",
                why=error.message,
            ) from error

    def read_stacks(self, helper: str, request: StackRequest) -> list[ProcessStacks]:
        """Return stacks, as read by another process of the job.

        Raises:
            RuntimeFailure: the manager or that process does not answer, or cannot read them.
        """
        return self._client.read_stacks(helper, request)
