"""Records of the clusters that this user has brought up, one private file each."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_core import env_vars
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import ClusterError, RLinfError
from rlinf_core.foreign.files import write_fault
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.node import node_facts
from rlinf_core.suggest import quoted

_VERSION: Final = 1


class RecordedNode(NamedTuple):
    """A node as `rlinf up` left it.

    Attributes:
        address, folder: its address and its folder of the cluster; None while it is not up.
        process: `PID:START` of its `ray start`.
        machine: the machine's identity; see `node_facts`.
    """

    rank: int
    host: str | None
    groups: tuple[str, ...]
    interpreter: str
    ssh: Mapping[str, Any]
    address: str | None = None
    folder: str | None = None
    process: str | None = None
    machine: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """A cluster that `rlinf up` has brought up, wholly or in part.

    Attributes:
        id: the mark of its folders and processes on the nodes.
        address: the address at which nodes reach the head's GCS, `HOST:PORT`; empty while the head is not up.
        authenticated: whether it needs a token.
        ports: the first and last port of its range.
        since: the time when it was first brought up, in seconds since 1970.
        synced: whether its code was shipped by `--sync`.
        path: the absolute path of the file; empty for standard input.
        section: a digest of the file's cluster section; see `section_digest`.
    """

    name: str
    id: str
    file: str
    address: str
    authenticated: bool
    ports: tuple[int, int]
    nodes: tuple[RecordedNode, ...] = field(default=())
    since: float = 0.0
    synced: bool = False
    path: str = ""
    section: str = ""

    @property
    def token_path(self) -> Path | None:
        """The path of its token on this machine; None if it needs no token."""
        return token_file(self.name) if self.authenticated else None

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def here(self) -> RecordedNode | None:
        """Return the node that this process runs on, or None."""
        own = node_facts.machine()
        alone = len(self.nodes) == 1 and self.nodes[0].host is None
        return next((node for node in self.nodes if alone or node.machine == own), None)


def section_digest(cluster: ClusterConfig) -> str:
    """Return a digest of a resolved cluster section without what only a job uses: placement, spares, `forward_env`."""
    of_job = {"component_placement", "spare_nodes", "forward_env"}
    section = cluster.model_dump(mode="json", exclude=of_job, fallback=str, warnings=False)
    return node_facts.digest_of(json.dumps(section, sort_keys=True))


def folder() -> Path:
    """Return the folder of the records: `$XDG_STATE_HOME/rlinf/clusters`, by default below `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "rlinf" / "clusters"


def token_file(name: str) -> Path:
    return folder() / f"{name}.token"


def load(name: str) -> ClusterRecord | None:
    """Return the record of a cluster, or None.

    Raises:
        RLinfError: the file is not a valid record.
    """
    path = folder() / f"{name}.json"
    try:
        data: dict[str, Any] = load_json_object(path.read_bytes())
        if data.pop("version") != _VERSION:
            raise ValueError("it was written by another version of rlinf")
        nodes = tuple(RecordedNode(**node)._replace(groups=tuple(node["groups"])) for node in data.pop("nodes"))
        first, last = data.pop("ports")
        return ClusterRecord(**data, ports=(first, last), nodes=nodes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RLinfError(
            f"the record of cluster `{name}` cannot be read",
            where=str(path),
            why=str(error),
            help="end the cluster by `rlinf down FILE`, which needs no record, or remove the file",
        ) from None


def names() -> list[str]:
    """Return the names of the recorded clusters."""
    try:
        return sorted(path.stem for path in folder().iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        return []


def recorded(name: str | None = None) -> ClusterRecord | None:
    """Return the record of the named cluster, by default that of `RLINF_CLUSTER`, else the only one; None if missing.

    Raises:
        ClusterError: there are several, and none is named.
    """
    name = name or env_vars.CLUSTER.get()
    if name is not None:
        return load(name)
    clusters = names()
    if len(clusters) > 1:
        listed = quoted(clusters)
        raise ClusterError(
            f"several clusters are up: {listed}", help=f"say which by `--name`, or by `{env_vars.CLUSTER.name}`"
        )
    return load(clusters[0]) if clusters else None


def save(record: ClusterRecord) -> None:
    """Write the record; see `write`."""
    data = {"version": _VERSION, **asdict(record), "nodes": [node._asdict() for node in record.nodes]}
    write(folder() / f"{record.name}.json", json.dumps(data, indent=1))


def write(path: Path, text: str) -> None:
    """Write a file in the folder of the records atomically, readable by this user only.

    Raises:
        RLinfError: it cannot be written.
    """
    make_folder()
    try:
        node_facts.write_private(str(path), text)
    except OSError as error:
        raise _unusable(error) from None


def forget(name: str) -> None:
    """Remove the record and the token of a cluster that no longer exists."""
    for path in (folder() / f"{name}.json", token_file(name)):
        path.unlink(missing_ok=True)


def make_folder() -> None:
    """Make the folder of the records unless it exists.

    Raises:
        RLinfError: it cannot be made, or is not writable.
    """
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder(), os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "nothing can be written in it")
    except OSError as error:
        raise _unusable(error) from None


def _unusable(error: OSError) -> RLinfError:
    return RLinfError(
        "the folder of cluster records cannot be used",
        where=str(folder()),
        why=write_fault(folder(), error),
        help="check its owner, permissions and disk, or set XDG_STATE_HOME to a folder of yours",
    )
