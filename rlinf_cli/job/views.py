"""The views of a job in `rlinf inspect`, as text and as data: its values with their origins, and its placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.job.job_file import SoundJob
from rlinf_cli.job.job_layout import (
    JobLayout,
    Layer,
    layer_text,
    masked,
    process_interpreter,
    process_variables,
    secret_texts,
)
from rlinf_cli.job.picture import NODE, Card, Picture, hosts_by_rank, robot_numbers, unit_cells
from rlinf_core.config.composing.origins import Nested, Origin, lines_of, nested_of, origins, says_something
from rlinf_core.config.diagnostics import visible
from rlinf_core.config.ranks import format_ranks, nodes_text
from rlinf_core.config.secrets import mask
from rlinf_core.config.sections.cluster import replaceable
from rlinf_core.config.tree import format_path
from rlinf_core.node.environment import process_environment
from rlinf_core.placement.strategy import Placement
from rlinf_core.scalars import plain
from rlinf_core.topology import ClusterTopology

CONFIG_SCHEMA = "rlinf.config/1"
# Origins are aligned in one column, except after longer values.
_COLUMN = 56


def config_result(job: SoundJob, *, every_value: bool = False) -> Result:
    """Return the configuration of a job with secrets masked; without `every_value` the text omits empty defaults."""
    tree = mask(job.tree, job.secret)
    values = list(origins(tree, job.model))
    shown = [origin for origin in values if every_value or says_something(origin)]
    return Result(partial(config_text, shown), partial(config_record, values))


def config_text(origins: Iterable[Origin]) -> str:
    """Return YAML that loads to the same values, with each value's origin as a comment."""
    lines = list(lines_of(nested_of(origins)))
    column = max((len(text) for text, origin in lines if origin and len(text) < _COLUMN), default=0)
    return "\n".join(f"{text.ljust(column)}  # {_where(origin)}" if origin else text for text, origin in lines)


def config_record(origins: Iterable[Origin]) -> dict[str, Any]:
    """Return the format `rlinf.config/1`: the data as a whole, and every value by its path.

    A number in a text field is the text as written, as is a number that JSON cannot express.
    """
    values = [(origin, _value(origin)) for origin in origins]
    nested = nested_of(origin for origin, _ in values)
    data = {origin.path: value for origin, value in values}
    return {
        "schema": CONFIG_SCHEMA,
        "config": _data(nested, data),
        "values": [_record(origin, value) for origin, value in values],
    }


def _where(origin: Origin) -> str:
    """Return an origin without the column, as in `job.yaml:9`."""
    if origin.span is None or origin.kind == "override":
        return origin.where
    return f"{origin.span.source.name}:{origin.span.begin.line}"


def _value(origin: Origin) -> Any:
    value = origin.value
    infinite = isinstance(value, float) and not math.isfinite(value)
    return origin.text if infinite or (origin.is_text and isinstance(value, int | float)) else plain(value)


def _data(nested: Nested, values: dict[Any, Any]) -> Any:
    if isinstance(nested, Origin):
        return values[nested.path]
    if nested and all(isinstance(key, int) for key in nested):
        return [_data(value, values) for value in nested.values()]
    return {str(key): _data(value, values) for key, value in nested.items()}


def _record(origin: Origin, value: Any) -> dict[str, Any]:
    begin = origin.span.begin if origin.span else None
    return {
        "path": format_path(origin.path),
        "value": value,
        "origin": origin.kind,
        "file": origin.span.source.name if origin.span else None,
        "line": begin.line if begin else None,
        "column": begin.column if begin else None,
    }


SCHEMA: Final = "rlinf.placement/1"
_HEADERS = ("component", "processes", "group", "nodes", "units", "per process", "accelerators")


def placement_result(job: SoundJob, layout: JobLayout, picture: Picture, *, every_process: bool) -> Result:
    """Return the answer of `rlinf inspect placement`."""

    def text() -> str:
        summary = summary_text(job, layout, picture)
        return f"{summary}\n\n{processes_table(job, layout)}" if every_process else summary

    return Result(text, lambda: placement_record(job, layout))


def summary_text(job: SoundJob, layout: JobLayout, picture: Picture) -> str:
    """Return the whole summary."""
    rows = [
        (
            *_row(name, component_placements, layout.resources[name]),
            _visible_accelerators(component_placements, job.topology),
        )
        for name, component_placements in layout.placements.items()
    ]
    lines = [console.style(picture.title, "bold"), console.parts(picture.subtitle), ""]
    lines.append(console.table(_HEADERS, rows, right=(1,), keep=(0, 1)) if rows else "no component is placed")
    notes = [*sharing_lines(picture), *_recipe_lines(job, layout), *_spare_lines(job), *_environment_lines(job, layout)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def processes_table(job: SoundJob, layout: JobLayout) -> str:
    """Return a row per process."""
    interpreters = {
        place: process_interpreter(job.cluster, placement).path
        for place, placement in _one_for_each_environment(layout).items()
    }
    hosts, numbers = hosts_by_rank(job.cluster), robot_numbers(job.topology)
    rows: list[tuple[str, ...]] = []
    for name, placements in layout.placements.items():
        for placement in placements:
            node = placement.cluster_node_rank
            held = [
                numbers.get((node, placement.hardware_type, local), local) for local in placement.local_hardware_ranks
            ]
            units = f"{placement.hardware_type} {format_ranks(held)}"
            rows.append(
                (
                    f"{name}:{placement.rank}",
                    f"{node} {hosts.get(node, '')}".strip(),
                    units if placement.local_hardware_ranks else "-",
                    f"{placement.local_rank} of {placement.local_world_size}",
                    interpreters[node, placement.node_group_label] or "the node's own",
                )
            )
    return console.table(("process", "node", "unit", "on its node", "python"), rows)


def _recipe_lines(job: SoundJob, layout: JobLayout) -> list[str]:
    """Return the recipe's notes on the placement."""
    say = job.recipe.load(job.recipe.placement_notes) if job.recipe is not None else None
    if say is None:
        return []
    nodes = {
        name: [placement.cluster_node_rank for placement in placements]
        for name, placements in layout.placements.items()
    }
    return list(say(job.model, nodes))


def _spare_lines(job: SoundJob) -> list[str]:
    """Return lines on the nodes that each spare can replace."""
    served: dict[tuple[int, ...], list[int]] = {}
    for spare in job.cluster.spare_ranks:
        served.setdefault(replaceable(job.cluster, spare), []).append(spare)
    return [f"spare: {nodes_text(spares)}, for {nodes_text(ranks)}" for ranks, spares in served.items() if ranks]


def _environment_lines(job: SoundJob, layout: JobLayout) -> list[str]:
    """Return the interpreters, and the variables that the runtime does not set, with their nodes and sources."""
    interpreters: dict[tuple[str, str], dict[int, None]] = {}
    variables: dict[tuple[str, str], dict[int, None]] = {}
    secrets = secret_texts(job)
    for placement in _one_for_each_environment(layout).values():
        node = placement.cluster_node_rank
        python = process_interpreter(job.cluster, placement)
        if python.path is not None:
            interpreters.setdefault((python.path, python.layer), {})[node] = None
        for variable in process_variables(job.cluster, placement):
            if variable.layer is not Layer.RUNTIME:
                value = visible(masked(variable.name, variable.value, secrets)) or '""'
                variables.setdefault((f"{variable.name}={value}", layer_text(variable)), {})[node] = None
    lines = [f"python: {path} on {nodes_text(nodes)} ({layer})" for (path, layer), nodes in interpreters.items()]
    return lines + [f"{setting} on {nodes_text(nodes)} ({layer})" for (setting, layer), nodes in variables.items()]


def _one_for_each_environment(layout: JobLayout) -> dict[tuple[int, str], Placement]:
    """Return one process for each node and group, because the file's environment depends only on these."""
    representatives = {
        (placement.cluster_node_rank, placement.node_group_label): placement
        for placements in layout.placements.values()
        for placement in placements
    }
    return dict(sorted(representatives.items()))


def _row(name: str, placements: Sequence[Placement], resources: str) -> tuple[str, ...]:
    groups = dict.fromkeys(placement.node_group_label for placement in placements)
    nodes = sorted({placement.cluster_node_rank for placement in placements})
    return name, str(len(placements)), ", ".join(groups), format_ranks(nodes), resources, _share(placements)


def _visible_accelerators(placements: Sequence[Placement], topology: ClusterTopology) -> str:
    """Return the accelerators that the processes of a component see, in words."""
    if any(placement.local_accelerator_rank is not None for placement in placements):
        return "its own"
    nodes = {placement.cluster_node_rank for placement in placements}
    if all(topology.nodes[node].num_accelerators == 0 for node in nodes):
        return "none"
    return "unrestricted"


def _share(placements: Sequence[Placement]) -> str:
    """Return the number of units of a process: `1`, `2`, `1/4` if four processes share a unit; `-` without a unit."""
    if not any(placement.local_hardware_ranks for placement in placements):
        return "-"
    users: dict[tuple[int, int], int] = {}
    for placement in placements:
        for index in placement.local_hardware_ranks:
            key = (placement.cluster_node_rank, index)
            users[key] = users.get(key, 0) + 1
    shares: set[str] = set()
    for placement in placements:
        held = len(placement.local_hardware_ranks)
        sharing = users[placement.cluster_node_rank, placement.local_hardware_ranks[0]]
        shares.add(str(held) if sharing == 1 else f"{held}/{sharing}")
    return ", ".join(sorted(shares))


def sharing_lines(picture: Picture) -> list[str]:
    """Return lines on shared and idle units, one for each distinct set of components."""
    by_users: dict[tuple[str, ...], dict[tuple[str, str], list[int]]] = {}
    for card in _cards(picture):
        for components, kind, units in _units(card):
            if len(components) != 1:
                by_users.setdefault(components, {}).setdefault((kind, units), []).extend(card.ranks)
    lines: list[str] = []
    for components in sorted(by_users, key=lambda users: (not users, users)):
        places = "; ".join(_place(kind, units, nodes) for (kind, units), nodes in by_users[components].items())
        lines.append(f"{' + '.join(components)} share {places}" if components else f"idle: {places}")
    empty = [rank for card in _cards(picture) if not card.cells and not card.loose for rank in card.ranks]
    if empty:
        lines.append(f"idle: {nodes_text(empty)} (no component)")
    return lines


def _place(kind: str, units: str, nodes: Sequence[int]) -> str:
    """Return a place, as in `accelerators 0-3 of nodes 0-7` or `nodes 0-7`."""
    on = nodes_text(nodes)
    return on if kind == NODE else f"{kind}{'' if units.isdigit() else 's'} {units} of {on}"


def _units(card: Card) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the sets of components on a node's units, each with the kind and the ranks of the units."""
    indices: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for cell in card.cells:
        indices.setdefault((cell.components, cell.kind), []).append(cell.index)
    for (components, kind), unit_indices in indices.items():
        yield components, kind, format_ranks(unit_indices)


def _cards(picture: Picture) -> Iterable[Card]:
    return (card for section in picture.sections for card in section.cards)


def placement_record(job: SoundJob, layout: JobLayout) -> dict[str, Any]:
    """Return every process and unit as data. The part `<...>` of a variable is known only on the node or at launch."""
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
        "units": [
            {
                "node_rank": cell.node_rank,
                "hardware_type": cell.hardware_type,
                "local_hardware_rank": cell.local_hardware_rank,
                "users": [f"{user.component}:{rank}" for user in cell.users for rank in user.ranks],
            }
            for cell in unit_cells(job.topology, layout.placements)
        ],
        "placement_mode": layout.mode,
        **({"notes": notes} if (notes := _recipe_lines(job, layout)) else {}),
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
