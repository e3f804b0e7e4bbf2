"""The inspection of running jobs from outside: by the drivers' records, else by a cluster's Ray."""

from __future__ import annotations

import os
import select
import shlex
import signal
from typing import Self

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.runs.run_lookup import find_run, runs_folder
from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.engine import JobRecord, running_jobs
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, RunError, RuntimeFailure
from rlinf_core.node import attach, process_life
from rlinf_core.node.stacks import ProcessStacks, StackRequest
from rlinf_core.process import proc
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.supervision.client import ManagerClient
from rlinf_core.supervision.job_view import JobSnapshot
from rlinf_core.supervision.lives import INSPECTOR, MANAGER

_FIRST_WORD = 2.0
# About 30 years; `select` refuses ten times as long.
_LONGEST = 1e9


def stop_run(run: str | None, timeout: float, *, force: bool) -> Result:
    """End an active run, and return a description of what was done.

    Args:
        run: the folder or name of the run; None for the active run.
        timeout: seconds to wait for its end.
        force: whether to kill the run, or to release it if its process cannot be seen.

    Raises:
        RunError: the run is not active, or it did not end.
    """
    folder = find_run(run)
    state = folder.state
    if not state.going_on:
        status, _ = state.outcome
        if run is None:
            why = f"the last, {folder.path.name}, is {status}"
            raise RunError("no run is active", where=str(runs_folder()), why=why)
        return Result(f"{shown(folder.path)} is already {status}")
    if not state.alive:
        # A run is only released if the user names it, because it may still be active.
        return _give_up(folder, force=force and run is not None)
    if force:
        _kill(folder, timeout)
    else:
        _ask(folder, timeout)
    return Result(f"{shown(folder.path)} has ended: process {state.pid}, after step {folder.refresh().step}")


def _give_up(folder: RunFolder, *, force: bool) -> Result:
    """Release a run whose process is not visible from here: mark it as interrupted, without killing a process."""
    process = folder.state.process
    if not force:
        raise RunError(
            "it is not known here whether the run is active",
            where=str(folder.path),
            why=f"its driver was {process}, on another machine or container, or its identity was not recorded",
            help=f"run the same command on {process.host or 'the machine of the driver'}\nif that machine or"
            f" container is gone for good, `rlinf stop {shlex.quote(shown(folder.path))} --force` releases the run, so"
            " that it can be resumed",
        )
    folder.end(RunStatus.INTERRUPTED, f"released by `rlinf stop --force`; its driver was {process}")
    return Result(
        f"{shown(folder.path)} is released after step {folder.state.step}; nothing was killed: its driver was {process}"
    )


def _ask(folder: RunFolder, timeout: float) -> None:
    """Send SIGTERM to the driver, and wait for its end."""
    pid = folder.state.pid
    if proc.stat(pid).is_stopped:
        raise RunError(
            "the run cannot end: its driver is stopped, as by SIGSTOP or Ctrl-Z",
            where=str(folder.path),
            help=f"`kill -CONT {pid}` lets it go on, so that this command ends it; or kill it with `--force`",
        )
    if not _ended_by(folder, signal.SIGTERM, timeout):
        raise RunError(
            f"the run did not end within {timeout:g} s",
            where=str(folder.path),
            why=f"process {pid} is still running",
            help="wait longer with `--timeout SECONDS`, or kill it with `--force`",
        )


def _kill(folder: RunFolder, timeout: float) -> None:
    """Send SIGKILL to the driver, and write the end status in its place."""
    if not _ended_by(folder, signal.SIGKILL, max(timeout, _FIRST_WORD)):
        raise RunError(
            f"process {folder.state.pid} was killed and is still present",
            where=str(folder.path),
            why="it is blocked in the kernel, on a device or a file system",
        )
    if folder.refresh().status == RunStatus.RUNNING:
        folder.end(RunStatus.INTERRUPTED, "killed by `rlinf stop --force`")


def _ended_by(folder: RunFolder, number: signal.Signals, seconds: float) -> bool:
    """Send a signal to a run's driver process, and no other; return whether it ends within `seconds`."""
    process = folder.state.process
    try:
        # The driver has the folder open, not a link to it.
        with process_life.held(process, folder.path.resolve()) as handle:
            process_life.send(handle, number)
            return _gone(handle, process.pid, seconds)
    except ProcessLookupError:
        return True
    except process_life.UnprovenProcessError as error:
        raise RunError(
            "no signal was sent: the process may not be this run's driver",
            where=str(folder.path),
            why=str(error),
            help=f"inspect it with `ps {process.pid}`, and end it with `kill {process.pid}`",
        ) from None
    except PermissionError:
        raise _not_ours(folder) from None
    except OSError as error:
        raise RunError(
            "the process of the run cannot be signalled",
            where=str(folder.path),
            why=error.strerror or str(error),
            help=f"inspect it with `ps {process.pid}`, and end it with `kill {process.pid}`",
        ) from None


def _not_ours(folder: RunFolder) -> RunError:
    return RunError(
        "the run belongs to another user",
        where=str(folder.path),
        why=f"you may not signal process {folder.state.pid}",
        help="ask that user, or run this command as that user",
    )


def _gone(handle: int, pid: int, seconds: float) -> bool:
    """Return whether the process of a handle ends within `seconds`; print a message while waiting."""
    first = min(_FIRST_WORD, seconds)
    # A pidfd becomes readable when the process has ended.
    if select.select([handle], [], [], first)[0]:
        return True
    if seconds > first:
        console.message(f"waiting for process {pid} to end, at most {seconds:g} s")
        return bool(select.select([handle], [], [], min(seconds - first, _LONGEST))[0])
    return False


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
