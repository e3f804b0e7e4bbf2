"""The ports of a node: the fixed division of the file's range, computed by `rlinf up` and by every driver."""

from __future__ import annotations

from typing import Final, NamedTuple

from rlinf_core.config.machines.cluster_values import FEWEST_PORTS
from rlinf_core.errors import ConfigError

_FIXED_PORTS: Final = 16


class NodePorts(NamedTuple):
    """The TCP ports that Ray and rlinf listen on; the same on every node.

    Attributes:
        gcs: where the head is joined; only the head listens on it.
        dashboard: the port of the head's dashboard, on loopback.
        first_worker, last_worker: the range that Ray's worker processes take theirs from.
        first_data, last_data: the range on which workers, channels and drivers of rlinf listen for each other.
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
        first = ports.start
        # Every process of rlinf is one of Ray's, too, which has others besides.
        first_data = ports.stop - (len(ports) - _FIXED_PORTS) // 3
        return cls(
            gcs=first,
            node_manager=first + 1,
            object_manager=first + 2,
            agent_listen=first + 3,
            agent_grpc=first + 4,
            runtime_env_agent=first + 5,
            metrics_export=first + 6,
            dashboard=first + 7,
            client_server=first + 8,
            first_worker=first + _FIXED_PORTS,
            last_worker=first_data - 1,
            first_data=first_data,
            last_data=ports.stop - 1,
        )

    @property
    def full_range(self) -> str:
        """The range as a file writes it, `first-last`."""
        return f"{self.gcs}-{self.last_data}"

    @property
    def data(self) -> str:
        """The range of rlinf's own listeners, `first-last`."""
        return f"{self.first_data}-{self.last_data}"

    def fixed(self, *, head: bool) -> dict[str, int]:
        """Return the ports with a single listener on a node, by the name of that listener."""
        only_head = {"gcs", "dashboard", "client_server"}
        names = self._fields[:9]
        return {name: getattr(self, name) for name in names if head or name not in only_head}
