"""RLinf's public names over ours, for its unit tests: names and shapes of values differ, no behaviour is added."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlinf_cli
import rlinf_core
from rlinf_core import ConfigError, WorkerAddress, WorkerGroup, load_job
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.cluster import CLUSTER_LABEL, NODE_LABEL
from rlinf_core.config.sections.cluster import ClusterConfig as OurClusterConfig
from rlinf_core.hardware.franka import Franka as FrankaConfig
from rlinf_core.topology import ClusterTopology
from rlinf_core.topology import NodeInfo as OurNode
from rlinf_core.worker.communication import Communication

__all__ = [
    "Accelerator",
    "AcceleratorType",
    "Channel",
    "Cluster",
    "ClusterConfig",
    "CollectiveGroupOptions",
    "ComponentPlacement",
    "FlexiblePlacementStrategy",
    "FrankaConfig",
    "HardwareInfo",
    "HardwareResource",
    "HybridComponentPlacement",
    "NodeGroupEnvConfig",
    "NodeGroupInfo",
    "NodeInfo",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Worker",
    "WorkerAddress",
]

# It makes keys of theirs known, each with what to write here.
assert rlinf_cli
_DATA: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("rlinf_lacking.json").read_text("utf-8"))


def reason(node_id: str) -> str | None:
    """Return why a test cannot hold here, by its id; None if it can."""
    return next((why for pattern, why in _DATA["tests"].items() if fnmatch.fnmatchcase(node_id, pattern)), None)


class Lacking:
    """A name of theirs that we lack: using it skips the test with the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(self._why)


def __getattr__(name: str) -> Any:
    if name in _DATA["names"]:
        return Lacking(_DATA["names"][name])
    raise AttributeError(name)


# Placement


class Accelerator:
    """The kind of hardware that ranks count first."""

    HW_TYPE = "accelerator"


class AcceleratorType:
    """Vendors of accelerators."""

    NPU = SimpleNamespace(value="NPU")
    MUSA_GPU = SimpleNamespace(value="MUSA_GPU")


class HardwareInfo(SimpleNamespace):
    """One device."""


class HardwareResource(SimpleNamespace):
    """The devices of a type on a node."""


class NodeGroupEnvConfig(SimpleNamespace):
    """The environment of some nodes of a group."""


class NodeInfo(SimpleNamespace):
    """A node with its devices."""

    @property
    def num_accelerators(self) -> int:
        return self.count(Accelerator.HW_TYPE)

    def count(self, kind: str) -> int:
        return sum(len(resource.infos) for resource in self.hardware_resources if resource.type == kind)


class NodeGroupInfo:
    """Nodes under a label."""

    DEFAULT_GROUP_LABEL = CLUSTER_LABEL
    NODE_PLACEMENT_GROUP_LABEL = NODE_LABEL

    def __init__(
        self,
        label: str,
        nodes: list[NodeInfo],
        hardware_type: str | None = None,
        env_configs: Sequence[NodeGroupEnvConfig] = (),
    ) -> None:
        self.label, self.nodes, self.hardware_type, self.env_configs = label, nodes, hardware_type, env_configs

    def written(self) -> dict[str, Any]:
        """Return the group as a file has it."""
        group: dict[str, Any] = {"label": self.label, "node_ranks": [node.node_rank for node in self.nodes]}
        if self.hardware_type not in (None, Accelerator.HW_TYPE):
            configs = [
                {"node_rank": node.node_rank, "robot_ip": f"10.9.{node.node_rank}.{number + 1}"}
                for node in self.nodes
                for number in range(node.count(str(self.hardware_type)))
            ]
            group["hardware"] = {"type": self.hardware_type, "configs": configs}
        return group

    def get_node_env_vars(self, rank: int) -> dict[str, str]:
        entries = [OmegaConf.to_container(config.env_vars) for config in self._of(rank)]
        return {str(name): value for entry in entries for pair in entry for name, value in pair.items()}

    def get_node_python_interpreter_path(self, rank: int) -> str:
        return next(config.python_interpreter_path for config in self._of(rank))

    def _of(self, rank: int) -> list[NodeGroupEnvConfig]:
        return [config for config in self.env_configs if rank in config.node_ranks]


def _topology(cluster: Any) -> Any:
    """Return our topology of their stand-in for a cluster."""
    if not hasattr(cluster, "_node_groups"):
        return cluster
    groups = [
        group.written() for label, group in cluster._node_groups.items() if label not in (CLUSTER_LABEL, NODE_LABEL)
    ]
    config = OurClusterConfig.model_validate({"num_nodes": len(cluster._nodes), "node_groups": groups})
    nodes = [OurNode(node.node_rank, node.num_accelerators, "NVIDIA") for node in cluster._nodes]
    return ClusterTopology.from_nodes(nodes, config)


def _theirs(placement: Any) -> Any:
    """Return a placement with their types: devices are text, and a process without one has -1."""
    fields = {name: getattr(placement, name) for name in placement.__slots__}
    first = placement.local_accelerator_rank
    return SimpleNamespace(
        **{
            **fields,
            "visible_accelerators": list(map(str, placement.visible_accelerators)),
            "local_hardware_ranks": list(placement.local_hardware_ranks),
            "local_accelerator_rank": -1 if first is None else first,
        }
    )


class _Renamed:
    """A strategy of ours that also places on their stand-in for a cluster."""

    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Any]:
        placed = super().get_placement(_topology(cluster), isolate_accelerator)  # type: ignore[misc]
        return list(map(_theirs, placed)) if hasattr(cluster, "_node_groups") else placed


class PackedPlacementStrategy(_Renamed, rlinf_core.PackedPlacementStrategy):
    """Ours."""


class FlexiblePlacementStrategy(_Renamed, rlinf_core.FlexiblePlacementStrategy):
    """Ours."""


class NodePlacementStrategy(_Renamed, rlinf_core.NodePlacementStrategy):
    """Ours."""


class ComponentPlacement(rlinf_core.ComponentPlacement):
    """Ours, from a configuration of OmegaConf."""

    def __init__(self, config: Any, cluster: Any) -> None:
        super().__init__(OmegaConf.to_container(config), _topology(cluster))

    def get_strategy(self, name: str) -> Any:
        strategy = super().get_strategy(name)
        place = strategy.get_placement
        return SimpleNamespace(get_placement=lambda cluster: list(map(_theirs, place(_topology(cluster)))))


HybridComponentPlacement = ComponentPlacement


# Configuration


class ClusterConfig:
    """The `cluster` section, read as `rlinf validate` reads it."""

    def __init__(self, section: OurClusterConfig) -> None:
        self.num_nodes = section.num_nodes
        self.node_groups = [
            SimpleNamespace(
                label=group.label,
                node_ranks=_within(group.node_ranks, section),
                hardware=group.hardware,
                hardware_type=group.hardware.type if group.hardware else None,
                env_configs=[
                    SimpleNamespace(
                        node_ranks=_within(config.node_ranks, section),
                        env_vars=[{name: value} for name, value in config.env_vars],
                        python_interpreter_path=config.python_interpreter_path,
                    )
                    for config in group.env_configs
                ],
            )
            for group in section.node_groups
        ]

    @classmethod
    def from_dict_cfg(cls, config: Any) -> ClusterConfig:
        return cls(read_cluster(config))

    def get_node_labels_by_rank(self, rank: int) -> list[str]:
        return [group.label for group in self._of(rank)]

    def get_node_python_interpreter_path_by_rank(self, rank: int) -> list[str]:
        configs = [config for group in self._of(rank) for config in group.env_configs if rank in config.node_ranks]
        return [config.python_interpreter_path for config in configs]

    def get_node_hw_configs_by_rank(self, rank: int) -> list[Any]:
        units = [unit for group in self._of(rank) if group.hardware for unit in group.hardware.configs]
        return [
            unit.model_copy(update={"camera_serials": list(unit.camera_serials)})
            for unit in units
            if unit.node_rank == rank
        ]

    def _of(self, rank: int) -> list[Any]:
        return [group for group in self.node_groups if rank in group.node_ranks]


def _within(ranks: Any, section: OurClusterConfig) -> list[int]:
    return [rank for rank in range(section.num_nodes) if rank in ranks]


def read_cluster(config: Any) -> OurClusterConfig:
    """Return our section of theirs.

    Raises:
        ConfigError: it is invalid.
    """
    data = {"cluster": OmegaConf.to_container(config)}
    job = load_job("-", stdin=json.dumps(data).encode(), environ={})
    errors = [finding for finding in job.diagnostics if finding.severity is Severity.ERROR]
    for error in errors:
        if error.code == "not-available":
            pytest.skip(f"{error.message}: {error.help}")
    if errors or job.cluster is None:
        raise ConfigError(errors[0].message if errors else "the section cannot be read")
    return job.cluster


# Workers


class Cluster(rlinf_core.Cluster):
    """Ours, from a section of OmegaConf."""

    def __init__(self, num_nodes: int | None = None, cluster_cfg: Any = None) -> None:
        super().__init__(num_nodes, cluster_cfg=None if cluster_cfg is None else read_cluster(cluster_cfg))


class CollectiveGroupOptions(SimpleNamespace):
    """A hint to a transport of GPUs."""


def _without_options(method: Any) -> Any:
    def call(self: Any, *args: Any, options: Any = None, **named: Any) -> Any:
        return method(self, *args, **named)

    return call


# Not in the subclass, whose `send` a group would offer to its callers.
for _method in ("send", "recv"):
    setattr(Communication, _method, _without_options(getattr(Communication, _method)))


class Worker(rlinf_core.Worker):
    """Ours, with their names of its facts."""

    torch_platform = None
    torch_device_type = None
    accelerator_type = None

    @property
    def _worker_address(self) -> WorkerAddress:
        return self.worker_address

    @property
    def _cluster_node_rank(self) -> int:
        return self._rlinf_context.placement.cluster_node_rank

    @property
    def _node_local_rank(self) -> int:
        return self._rlinf_context.placement.local_rank

    @property
    def _local_accelerator_rank(self) -> int:
        rank = self._rlinf_context.placement.local_accelerator_rank
        return -1 if rank is None else rank


class Channel(rlinf_core.Channel):
    """Ours, with their name of a batch's weight."""

    def get_batch(self, target_weight: float, **options: Any) -> Any:  # type: ignore[override]
        return super().get_batch(target_weight, **options)

    def __reduce__(self) -> Any:
        super().__reduce__()
        return Channel, (self.name,)


WorkerGroup._close = WorkerGroup.shutdown  # type: ignore[attr-defined]
