"""A look at a running job from outside, by the record that its driver left."""

from __future__ import annotations

import os

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster.job_record import JobRecord, running_jobs
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, RuntimeFailure
from rlinf_core.manager.client import ManagerClient
from rlinf_core.manager.messages import INSPECTOR, Inspect, JobPicture
from rlinf_core.manager.post import expect
from rlinf_core.suggest import did_you_mean, quoted

_SECONDS = 10.0


def find_job(name: str | None = None) -> JobRecord:
    """The running job of this name, or the youngest one.

    Raises:
        ClusterError: none runs on this machine under this user, or none of this name.
    """
    jobs = running_jobs()
    if not jobs:
        raise ClusterError(
            "no job is running",
            where="this machine",
            why="no driver of yours has launched a group here",
            help="run this on the machine of the job's driver, as the same user",
        )
    if name is None:
        return jobs[0]
    names = [job.job for job in jobs]
    if name not in names:
        raise ClusterError(
            f"no job named `{name}` is running", help=did_you_mean(name, names) or f"running: {quoted(names)}"
        )
    return jobs[names.index(name)]


def inspect_job(record: JobRecord, *, stacks: bool) -> JobPicture:
    """What each process of a job is in now.

    Args:
        record: the job.
        stacks: whether to ask for the stacks of their threads, too.

    Raises:
        ClusterError: the job does not answer.
    """
    session = Session(record.job, bytes.fromhex(record.secret))
    client = ManagerClient(session, record.manager, WorkerAddress(f"{INSPECTOR}-{os.getpid()}"))
    try:
        return expect(client.request(Inspect(stacks), _SECONDS), JobPicture)
    except RuntimeFailure as error:
        raise ClusterError(
            f"the job `{record.job}` does not answer", where=f"its driver has pid {record.pid}", why=error.message
        ) from error
    finally:
        client.close(linger=0.0)
