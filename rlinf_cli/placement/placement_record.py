"""The format `rlinf.placement/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_cli.file.job_file import SoundJob
from rlinf_cli.placement.job_layout import JobLayout, masked, secret_texts
from rlinf_cli.placement.process_variables import process_variables
from rlinf_cli.placement.unit_uses import unit_uses
from rlinf_core.config.machines.cluster import replaceable
from rlinf_core.placement.environment import process_environment
from rlinf_core.placement.strategy import Placement

SCHEMA = "rlinf.placement/1"


def placement_record(job: SoundJob, layout: JobLayout) -> dict[str, Any]:
    """Return every process and every unit. A part of a variable in `<...>` is known only on the node or at launch."""
    return {
        "schema": SCHEMA,
        "num_nodes": job.topology.num_nodes,
        "spares": [
            {"node_rank": spare, "serves_as": list(replaceable(job.cluster, spare))}
            for spare in job.cluster.spare_ranks
        ],
        "components": {
            name: {"world_size": len(placements), "processes": _processes(job, placements)}
            for name, placements in layout.placements.items()
        },
        "units": _units(job, layout.placements),
        "placement_mode": layout.mode,
    }


def _processes(job: SoundJob, placements: Sequence[Placement]) -> list[dict[str, Any]]:
    secrets = secret_texts(job)
    places = {(placement.cluster_node_rank, placement.node_group_label) for placement in placements}
    environments = {place: process_environment(job.cluster, *place) for place in places}
    records: list[dict[str, Any]] = []
    for placement in placements:
        environment = environments[placement.cluster_node_rank, placement.node_group_label]
        variables = process_variables(job.cluster, placement, environment=environment)
        records.append(
            {
                "rank": placement.rank,
                "node_rank": placement.cluster_node_rank,
                "placement_node_rank": placement.placement_node_rank,
                "local_rank": placement.local_rank,
                "local_world_size": placement.local_world_size,
                "hardware_type": placement.hardware_type,
                "local_hardware_ranks": list(placement.local_hardware_ranks),
                "visible_accelerators": list(placement.visible_accelerators),
                "node_group": placement.node_group_label,
                "python": environment.interpreter,
                "env": {variable.name: masked(variable.name, variable.value, secrets) for variable in variables},
                "env_layers": {variable.name: str(variable.layer) for variable in variables},
            }
        )
    return records


def _units(job: SoundJob, placements: Mapping[str, Sequence[Placement]]) -> list[dict[str, Any]]:
    return [
        {
            "node_rank": use.node_rank,
            "hardware_type": use.hardware_type,
            "local_hardware_rank": use.local_hardware_rank,
            "users": [f"{component}:{rank}" for component, rank in use.users],
        }
        for use in unit_uses(job.topology, placements)
    ]
