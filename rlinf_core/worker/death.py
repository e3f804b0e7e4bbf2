"""The cause of a worker's death, from the job's manager and Ray."""

from __future__ import annotations

import re
from typing import Final

from rlinf_core.collective.connections.connection import NO_ANSWER
from rlinf_core.errors import ProcessEnd, WorkerDiedError
from rlinf_core.manager.manager_client import current_client

_NODE_LEFT = "its node left the cluster"
_EXIT_CODE = re.compile(r"exit code (-?\d+)")
# A forked process without a status.
GONE: Final = "its process is gone"


class ProcessGone(Exception):  # noqa: N818 - a vehicle, as `RemoteFailure`: seen as `WorkerDiedError`
    """The end of a forked process, in the words of its host."""


def describe_death(error: BaseException, address: str, node: str, incarnation: int) -> WorkerDiedError:
    """Return the error for a worker that Ray reports dead; waits briefly for the manager's findings."""
    text = str(error)
    client = current_client()
    own_reason = client.deaths.ended_here(address, incarnation) if client is not None else None
    if own_reason is not None:
        return WorkerDiedError(address, node=node, cause=own_reason)
    news = client.deaths.wait(address, incarnation) if client is not None else None
    known_cause, end = (news.cause, news.end) if news is not None else (None, None)
    reported_end = _end_in(text)
    if reported_end is None:
        reason = _ray_says(text)
    else:
        # Where the kernel's word is known, it says the same.
        reason = reported_end.words if end is None else None
    cause = "; ".join(part for part in (reason, known_cause) if part) or None
    return WorkerDiedError(address, node=node, cause=cause, end=end or reported_end)


def took_its_node(error: WorkerDiedError) -> bool:
    """Return whether a worker died with its node, or cannot be reached there any more."""
    cause = error.cause or ""
    return cause.startswith(NO_ANSWER) or _NODE_LEFT in cause


def _end_in(text: str) -> ProcessEnd | None:
    """Return the end that Ray, or the host of forked processes, reports; None if there is none, or it is a guess."""
    code = _EXIT_CODE.search(text)
    if code is None or code[1] == "0" or text.startswith(GONE) or _ran_out_of_memory(text):
        return None
    return ProcessEnd.from_exit_code(int(code[1]))


def _ran_out_of_memory(text: str) -> bool:
    return "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text


def _ray_says(text: str) -> str | None:
    if _ran_out_of_memory(text):
        return "it was killed because its node ran out of memory"
    if text.startswith(GONE):
        return text
    if "ray.kill" in text:
        return "it was ended by its group's shutdown"
    if "NODE_DIED" in text or "node has died" in text or "node which the actor" in text:
        return _NODE_LEFT
    return None
