"""Which cluster that `rlinf up` brought up a process of this machine belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_core import env_vars
from rlinf_core.bootstrap import node_facts, state
from rlinf_core.errors import ClusterError


class Known(NamedTuple):
    """A cluster, as a driver on one of its nodes joins it.

    Attributes:
        address: of its GCS, `HOST:PORT`.
        token_path: where its token is on this machine, or None when it asks for none.
    """

    name: str
    address: str
    token_path: str | None


def known() -> Known | None:
    """Return the cluster that this machine is a node of; None when there is none.

    It is the one in this user's records, or whose node runs here. Of several `RLINF_CLUSTER` names one.

    Raises:
        ClusterError: there are several, or this machine is a node of none of those in the records.
    """
    name = env_vars.CLUSTER.get()
    here = {each.name: each for each in _running_here() if name in (None, each.name)}
    if len(here) > 1:
        listed = ", ".join(f"`{each}`" for each in sorted(here))
        raise ClusterError(f"this machine is a node of several clusters: {listed}", help=_name_one())
    if here:
        return next(iter(here.values()))
    try:
        record = state.recorded(name)
    except ClusterError as error:
        raise ClusterError(error.message, help=_name_one()) from None
    if record is None:
        return None
    if record.here() is None:
        raise ClusterError(
            f"this machine is not a node of cluster `{record.name}`",
            why="a driver has to run on one of them",
            help="run it by `rlinf train`, which runs it on the head over ssh",
        )
    raise ClusterError(
        f"cluster `{record.name}` is recorded, and Ray does not run on this node of it",
        help=f"`rlinf up {record.file}` repairs what is missing",
    )


def _name_one() -> str:
    return f"say which by `{env_vars.CLUSTER.name}`"


def _running_here() -> Iterator[Known]:
    """Return the clusters of this user whose Ray runs on this machine."""
    base = Path(node_facts.folder_of("x")).parent
    if not base.is_dir():
        return
    for folder in sorted(base.glob("up-*")):
        record: dict[str, Any] | None = node_facts.running(str(folder)) if folder.is_dir() else None
        if record is not None and record["alive"]:
            token = folder / "token"
            yield Known(str(record["name"]), str(record["gcs"]), str(token) if token.exists() else None)


def authenticate(cluster: Known) -> None:
    """Have this process's Ray prove the cluster's token. Ray reads this when it is imported, so it comes before."""
    os.environ["RAY_AUTH_MODE"] = "token" if cluster.token_path else "disabled"
    if cluster.token_path:
        os.environ["RAY_AUTH_TOKEN_PATH"] = cluster.token_path
