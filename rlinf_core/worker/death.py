"""The cause of a worker's death, from the job's manager and Ray."""

from __future__ import annotations

import re
from typing import Final

from rlinf_core.collective.connections.connection import NO_ANSWER
from rlinf_core.errors import WorkerDiedError
from rlinf_core.manager.manager_client import current_client

_NODE_LEFT = "its node left the cluster"
_EXIT_CODE = re.compile(r"exit code (-?\d+)")
# A forked process without a status.
GONE: Final = "its process is gone"


class ProcessGone(Exception):  # noqa: N818 - a vehicle, as `RemoteFailure`: seen as `WorkerDiedError`
    """The end of a forked process, in the words of its host."""


def describe_death(error: BaseException, address: str, node: str, incarnation: int) -> WorkerDiedError:
    """Return the error for a worker that Ray reports dead; waits briefly for the manager's findings."""
    ray_reason = _ray_says(str(error))
    client = current_client()
    news = client.news_of_death(address, incarnation) if client is not None else None
    known_cause, end = (news.cause, news.end) if news is not None else (None, None)
    if end is not None and ray_reason is not None and "exit code" in ray_reason:
        ray_reason = None  # the kernel's word says the same
    cause = "; ".join(part for part in (ray_reason, known_cause) if part) or None
    return WorkerDiedError(address, node=node, cause=cause, end=end)


def took_its_node(error: WorkerDiedError) -> bool:
    """Return whether a worker died with its node, or cannot be reached there any more."""
    cause = error.cause or ""
    return cause.startswith(NO_ANSWER) or _NODE_LEFT in cause


def _ray_says(text: str) -> str | None:
    if "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return "it was killed because its node ran out of memory"
    if text.startswith(GONE):
        return text
    code = _EXIT_CODE.search(text)
    if code and code[1] != "0":
        return f"its process ended with exit code {code[1]}"
    if "ray.kill" in text:
        return "it was ended by its group's shutdown"
    if "NODE_DIED" in text or "node has died" in text or "node which the actor" in text:
        return _NODE_LEFT
    return None
