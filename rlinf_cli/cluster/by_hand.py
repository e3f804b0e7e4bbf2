"""Nodes that are started one by one, each on its own machine: by hand, Slurm or Kubernetes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_core.config.machines.cluster import SshConfig
from rlinf_core.config.machines.hosts import HostSyntaxError, expand_hosts
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.node import cluster_records

_PAUSE: Final = 0.2


class ThisNode(NamedTuple):
    """The node of this machine.

    Attributes:
        head_address: the address of node 0; None on node 0 itself.
    """

    rank: int
    head_address: str | None


def place(
    nodes: Sequence[NodeTarget], node_rank: int | None, head_address: str | None, environ: Mapping[str, str]
) -> ThisNode | None:
    """Return the node of this machine, or None if all nodes are to be started from here.

    Args:
        nodes: the nodes of the file.
        node_rank, head_address: the options; by default from Slurm, if the file has no hosts.
        environ: the environment with Slurm's variables.

    Raises:
        ConfigError: there is no such node, the head's address is missing, or there are no hosts.
    """
    if node_rank is None and head_address is not None:
        raise ConfigError("`--head-address` requires `--node-rank`", help="add `--node-rank K`")
    if node_rank is None:
        if len(nodes) == 1 or nodes[0].host is not None:
            return None
        node_rank, head_address = _from_slurm(environ)
    if node_rank is None:
        raise ConfigError(
            f"the file has {len(nodes)} nodes and no hosts",
            why="there is no way to reach them",
            help="add `hosts` to the file, or run `rlinf up FILE --node-rank K --head-address A` on each machine",
        )
    if node_rank >= len(nodes):
        raise ConfigError(f"the file has no node {node_rank}", help=f"its nodes are 0 to {len(nodes) - 1}")
    if node_rank > 0 and head_address is None:
        head_address = _from_slurm(environ)[1]
        if head_address is None:
            raise ConfigError("the address of node 0 is missing", help="add `--head-address A`")
    return ThisNode(node_rank, head_address)


def _from_slurm(environ: Mapping[str, str]) -> tuple[int | None, str | None]:
    rank, listed = environ.get("SLURM_NODEID", ""), environ.get("SLURM_JOB_NODELIST", "")
    if not rank.isdigit():
        return None, None
    try:
        return int(rank), next(iter(expand_hosts(listed)), None) if listed else None
    except HostSyntaxError:
        return int(rank), None


def here(nodes: Sequence[NodeTarget]) -> tuple[NodeTarget, ...]:
    """Return the nodes as local ones, without ssh."""
    return tuple(replace(node, host=None, ssh=SshConfig()) for node in nodes)


def shared_token(name: str, file: str | None, alone: ThisNode | None, seconds: float) -> str | None:
    """Return the token for a node started by hand; None if the cluster's own is used or made.

    Node 0 makes it. The others wait for the same file on a shared home.

    Raises:
        RLinfError: it does not appear in time, or is readable by others.
    """
    if file is None and (alone is None or alone.rank == 0):
        return None
    path = Path(file) if file is not None else cluster_records.token_file(name)
    end = time.monotonic() + seconds
    while not path.exists() and file is None and time.monotonic() < end:
        time.sleep(_PAUSE)
    try:
        if path.stat().st_mode & 0o077:
            raise RLinfError("the token is readable by others", where=str(path), help="run `chmod 600` on it")
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise RLinfError(
            "this node has no token of the cluster",
            where=str(path),
            why=str(error.strerror),
            help="node 0 creates it: start node 0 first, and pass its file to the others with `--token-file`",
        ) from None
    if not token:
        raise RLinfError("the token is empty", where=str(path), help="copy it again from node 0")
    return token
