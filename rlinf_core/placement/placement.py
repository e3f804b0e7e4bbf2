"""The placement of one process: its node and devices."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_core.hardware.accelerators.registry import get_accelerator

# The visibility variable for vendors without their own.
DEFAULT_VISIBILITY_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one process of a component.

    Attributes:
        rank: its rank among the component's `world_size` processes.
        cluster_node_rank: the rank of its node in the cluster.
        placement_node_rank: the index of its node among the nodes that this component uses, in order of first use.
        local_rank: its index among the `local_world_size` processes of this component on its node.
        local_accelerator_rank: the index on its node of the first accelerator assigned to it, or None without one.
        accelerator_type: the vendor of its node's accelerators, as in `NVIDIA`; None if none or unknown.
        visible_accelerators: the accelerators it sees, as indices on its node: the assigned ones, or all of the node if
        it has none or is not isolated.
        visible_device_ids: their names in the visibility variable, if these are not the indices; else empty.
        isolate_accelerator: whether it sees only its assigned accelerators, if any.
        hardware_type: the accelerators' vendor, a robot's `hardware.type`, or `node`.
        local_hardware_ranks: its units among the node's units of that type; empty if it was placed on nodes regardless
        of hardware.
        node_group_label: the group that selected its node.
    """

    rank: int
    world_size: int
    cluster_node_rank: int
    placement_node_rank: int
    local_rank: int
    local_world_size: int
    local_accelerator_rank: int | None
    accelerator_type: str | None
    visible_accelerators: tuple[int, ...]
    visible_device_ids: tuple[str, ...]
    isolate_accelerator: bool
    hardware_type: str
    local_hardware_ranks: tuple[int, ...]
    node_group_label: str

    @property
    def visibility_variable(self) -> str:
        """The environment variable that lists the visible accelerators."""
        if self.accelerator_type is None:
            return DEFAULT_VISIBILITY_VARIABLE
        return get_accelerator(self.accelerator_type).visibility_variable or DEFAULT_VISIBILITY_VARIABLE

    def environment(self) -> dict[str, str]:
        """Return the variables of this process that depend on its placement, except MASTER_ADDR and MASTER_PORT.

        A process that sees only its own accelerators has `LOCAL_RANK` 0 of 1, since frameworks use `LOCAL_RANK` as the
        device index. `NODE_LOCAL_RANK` always counts the component's processes on the node. A process without
        accelerators keeps its node's visibility variable.
        """
        local_rank, local_world_size = self.local_rank, self.local_world_size
        if self.local_accelerator_rank is not None:
            if self.isolate_accelerator:
                local_rank, local_world_size = 0, 1
            else:
                local_rank = self.local_accelerator_rank
        variables = {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "NODE_RANK": str(self.placement_node_rank),
            "NODE_LOCAL_RANK": str(self.local_rank),
        }
        if self.local_accelerator_rank is not None:
            visible = self.visible_device_ids or self.visible_accelerators
            variables[self.visibility_variable] = ",".join(map(str, visible))
        return variables
