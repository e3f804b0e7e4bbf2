"""The clusters of `rlinf up` that a driver on this machine can join, their tokens, and their ports.

`rlinf up` and every driver divide a file's range of ports in the same way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_core import env_vars
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.cluster_values import FEWEST_PORTS
from rlinf_core.errors import ClusterError, ConfigError, RLinfError
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.suggest import quoted

# The first fields of `NodePorts` are ports with a single listener; a few more ports are left free after them.
_SINGLE_PORTS: Final = 9
_FIXED_PORTS: Final = 16


class NodePorts(NamedTuple):
    """The TCP ports that Ray and rlinf listen on; the same on every node.

    Attributes:
        gcs: the port at which nodes and drivers join the head; only the head listens on it.
        dashboard: the port of the head's dashboard, on loopback.
        first_worker, last_worker: the range for Ray's worker processes.
        first_data, last_data: the range on which rlinf's workers, channels and drivers listen for each other.
    """

    gcs: int
    node_manager: int
    object_manager: int
    agent_listen: int
    agent_grpc: int
    runtime_env_agent: int
    metrics_export: int
    dashboard: int
    client_server: int
    first_worker: int
    last_worker: int
    first_data: int
    last_data: int

    @classmethod
    def of(cls, ports: range) -> NodePorts:
        """Return the layout within a range.

        Raises:
            ConfigError: the range is too short.
        """
        if len(ports) < FEWEST_PORTS:
            raise ConfigError(
                f"`cluster.ports` holds {len(ports)} ports, Ray needs {FEWEST_PORTS}",
                why="every worker process of Ray listens on one",
                help=f"write a longer range, as in `{ports.start}-{ports.start + 999}`",
            )
        # Every process of rlinf needs a port of Ray, too, and Ray has further processes.
        first, first_data = ports.start, ports.stop - (len(ports) - _FIXED_PORTS) // 3
        single = range(first, first + _SINGLE_PORTS)
        return cls._make([*single, first + _FIXED_PORTS, first_data - 1, first_data, ports.stop - 1])

    @property
    def full_range(self) -> str:
        """The range as a file writes it, `first-last`."""
        return f"{self.gcs}-{self.last_data}"

    @property
    def data(self) -> str:
        """The range of rlinf's own listeners, `first-last`."""
        return f"{self.first_data}-{self.last_data}"

    def fixed(self, *, head: bool) -> dict[str, int]:
        """Return the ports with a single listener on a node, by the listener's name."""
        only_head = {"gcs", "dashboard", "client_server"}
        names = self._fields[:_SINGLE_PORTS]
        return {name: getattr(self, name) for name in names if head or name not in only_head}


# The address that stands for an embedded Ray.
LOCAL: Final = "local"
# The label in Ray that holds the rank of a node of `rlinf up`.
RANK_LABEL: Final = "rlinf.io/rank"
_LOOPBACK: Final = ("127.", "::1", "localhost")


class Known(NamedTuple):
    """A cluster that a driver on this machine can join.

    Attributes:
        address: the address of its GCS, `HOST:PORT`.
        token_path: the file of its token on this machine; None if it needs no token.
        num_nodes: the number of nodes in its file; None if not recorded.
        ports: the range of this machine's ports for rlinf's own listeners, `first-last`; None for any.
        rank: this machine's rank in it.
        interpreter: the Python that runs Ray on this machine.
        path: the absolute path of the file that it was brought up from.
        section: a digest of that file's cluster section; see `ClusterRecord`.
    """

    name: str
    address: str
    token_path: str | None
    num_nodes: int | None = None
    ports: str | None = None
    runs_here: bool = True
    rank: int = 0
    interpreter: str = ""
    path: str = ""
    section: str = ""


def known() -> Known | None:
    """Return the cluster that this machine is a node of, or None. `RLINF_CLUSTER` selects one of several.

    Raises:
        ClusterError: several clusters match, or the recorded cluster does not run on this machine.
    """
    name = env_vars.CLUSTER.get()
    here = _only_one(cluster for cluster in running_here() if name in (None, cluster.name))
    if here is not None:
        return here
    try:
        record = cluster_records.recorded(name)
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
        help=f"`rlinf up {record.file}` repairs what is missing, `rlinf down --name {record.name}` forgets it",
    )


def destination(address: str | None, num_nodes: int | None, *, may_start: bool) -> Known | str | None:
    """Return the cluster or Ray that a driver on this machine joins.

    Args:
        address: the address of a head, `HOST:PORT`, or `local`; None means `RLINF_ADDRESS`.
        num_nodes: the number of nodes that the job asks for; None for any number.
        may_start: whether an embedded Ray would do. If so, a cluster of `rlinf up` that `RLINF_CLUSTER` does not name
            is joined only if it has as many nodes as the job asks for.

    Returns:
        A cluster of `rlinf up`; the address of another Ray; None for an embedded Ray.

    Raises:
        ClusterError: several clusters match, the named one does not run here, or none exists but one is needed.
    """
    address = str(address) if address else env_vars.ADDRESS.get()
    if address == LOCAL:
        return None
    if address is not None:
        return _at(address) or address
    name = env_vars.CLUSTER.get()
    if name is None and may_start:
        return _only_one(cluster for cluster in running_here() if num_nodes in (None, cluster.num_nodes))
    own_cluster = known()
    if own_cluster is None:
        raise _nothing_to_join(name)
    return own_cluster


def may_be_embedded(num_nodes: int | None, config: ClusterConfig | None) -> bool:
    """Return whether a job can run on an embedded Ray: it needs only one node, and its file names no hosts."""
    names_hosts = config is not None and bool(config.hosts or any(group.hosts for group in config.node_groups))
    return num_nodes in (None, 1) and not names_hosts


def _at(address: str) -> Known | None:
    """Return the cluster of `rlinf up` whose head is at `HOST:PORT`; None if this machine knows none."""
    host, _, port = address.rpartition(":")
    on_port = [cluster for cluster in (*running_here(), *_recorded()) if cluster.address.rpartition(":")[2] == port]
    for candidate in on_port:
        if candidate.address.rpartition(":")[0] in (host, _resolved(host)):
            return candidate
    # A head on this machine is also reachable at loopback, whatever address it advertises.
    local = host.strip("[]").startswith(_LOOPBACK)
    return next((cluster for cluster in on_port if local and cluster.runs_here), None)


def is_same_head(one: str, other: str) -> bool:
    """Return whether two addresses, `HOST:PORT`, are of one head: this machine's may be written as loopback."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    local = any(name.strip("[]").startswith(_LOOPBACK) for name in (host, other_host))
    return port == other_port and (local or (_resolved(host) or host) == (_resolved(other_host) or other_host))


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _only_one(clusters: Iterator[Known]) -> Known | None:
    by_name = {cluster.name: cluster for cluster in clusters}
    if len(by_name) > 1:
        listed = quoted(sorted(by_name))
        raise ClusterError(f"this machine is a node of several clusters: {listed}", help=_name_one())
    return next(iter(by_name.values()), None)


def _name_one() -> str:
    return f"say which by `{env_vars.CLUSTER.name}`"


def _nothing_to_join(name: str | None) -> ClusterError:
    if name is None:
        return ClusterError(
            "no cluster is running that could be joined",
            why="more nodes or other hosts than this machine are asked for, `rlinf up` has brought none up here, and"
            f" neither an address nor `{env_vars.ADDRESS.name}` is given",
            help='`rlinf up FILE` brings one up; one that was started by hand is given as `address="HOST:PORT"` or'
            f" `{env_vars.ADDRESS.name}`",
        )
    names = sorted({*(cluster.name for cluster in running_here()), *cluster_records.names()})
    return ClusterError(
        f"no cluster `{name}` is known here",
        where=f"`{env_vars.CLUSTER.name}`",
        why=f"known are {quoted(names)}" if names else "`rlinf up` has brought none up",
        help="bring it up by `rlinf up FILE --name NAME`, or unset the variable",
    )


def running_here() -> Iterator[Known]:
    """Yield the clusters of this user whose Ray runs on this machine."""
    base = Path(node_facts.private_base())
    if not base.is_dir():
        return
    for folder in sorted(base.glob("up-*")):
        record: dict[str, Any] | None = node_facts.running(str(folder)) if folder.is_dir() else None
        if record is not None and record["alive"]:
            token = folder / "token"
            path = str(token) if token.exists() else None
            spec = record["spec"]
            first, _, last = str(spec["ports"]).partition("-")
            ports = NodePorts.of(range(int(first), int(last) + 1)).data
            yield Known(
                str(record["name"]),
                str(record["gcs"]),
                path,
                spec["num_nodes"],
                ports,
                rank=int(record["rank"]),
                interpreter=str(spec["interpreter"]),
                path=str(record.get("path", "")),
                section=str(record.get("section", "")),
            )


def _recorded() -> Iterator[Known]:
    """Yield the clusters in this user's records, wherever their nodes are."""
    for name in cluster_records.names():
        try:
            record = cluster_records.load(name)
        except RLinfError:
            continue  # an unreadable record is reported when its cluster is named
        if record is not None:
            path = str(record.token_path) if record.token_path else None
            yield Known(record.name, record.address, path, record.num_nodes, runs_here=False)


def prepare(cluster: Known | None) -> None:
    """Set the variables with which this process joins a cluster: Ray's authentication, and the ports for its own
    listener. Ray reads its variables once, when it is imported.

    Args:
        cluster: the cluster to join; its token replaces any other. None for a cluster that `rlinf up` did not start,
            whose token the environment names.

    Raises:
        ClusterError: the environment asks for a token, but there is none: Ray would end the whole process.
    """
    if cluster is not None:
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ["RAY_AUTH_MODE"] = "token" if cluster.token_path else "disabled"
        if cluster.token_path:
            os.environ["RAY_AUTH_TOKEN_PATH"] = cluster.token_path
        if cluster.ports:
            os.environ[env_vars.PORTS.name] = cluster.ports
    elif os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        if not _holds_text(path):
            raise ClusterError(
                "this process has no token for Ray",
                where=str(path),
                why="`RAY_AUTH_MODE` is `token`, and the token file is missing, empty or unreadable",
                help="set `RAY_AUTH_TOKEN_PATH` to the cluster's token file",
            )


def _holds_text(path: Path) -> bool:
    try:
        return bool(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return False
