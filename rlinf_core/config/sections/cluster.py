"""The `cluster` section: machines, their hardware, and the placement of components.

These models validate each value separately. Relations between values are checked in `rules/`.

An invalid value raises a `PydanticCustomError` whose `type` is the diagnostic code. Its `ctx` may hold `start` and
`end`, offsets in the scalar's raw text, and `help`. Validators of lists and mappings report every invalid item, under
its index or key in `loc`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Final, cast

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema

from rlinf_core.config.model import ConfigModel
from rlinf_core.config.ranks import RANK_MAP_SCHEMA, NodeRanksField, RankMap, RankMapField
from rlinf_core.config.sections.cluster_values import (
    Address,
    ComponentKey,
    EnvVars,
    Hosts,
    InterpreterPath,
    Labels,
    Line,
    Name,
    Ports,
    SshOptions,
    SshPath,
    SshWord,
    VariableName,
    split_names,
)
from rlinf_core.config.tree import Path
from rlinf_core.hardware.robots import RobotUnit, hardware_model
from rlinf_core.scalars import Bool, Float, Int, Text, expected

# Below Linux's default ephemeral range (32768-60999), where client sockets may hold a port.
DEFAULT_PORTS = range(20000, 21000)
# Groups that always exist: every node with its accelerators, and every node regardless of hardware.
CLUSTER_LABEL = "cluster"
NODE_LABEL = "node"
RESERVED_LABELS = (CLUSTER_LABEL, NODE_LABEL)
MAX_NODES = 100_000
MAX_ACCELERATORS_PER_NODE = 1024

# In GiB: as bytes, more would not fit into an integer of 64 bits.
MAX_MEMORY = 2**32
Memory = Annotated[Float, Field(gt=0, le=MAX_MEMORY, allow_inf_nan=False)]


class PlacementEntry(ConfigModel):
    """The placement of a component's processes. A bare rank map is a valid entry."""

    placement: RankMapField = Field(
        examples=["0-7"],
        description="Rank map RESOURCES[:PROCESSES], as in `0-7`, `0-1:0-199,2-3:200-399` or `all`. Resource ranks"
        " count the selected group's hardware units, else its accelerators, else its nodes.",
    )
    node_group: Labels = Field(
        default=(),
        description="Label of the node group whose ranks are used; several as `a,b` or a list, numbered"
        " consecutively in that order. `node` counts every node and ignores hardware. Default: `cluster`, all"
        " nodes.",
    )
    elastic: Bool = Field(
        default=False,
        description="Go on with fewer processes while nodes are lost that no spare replaces, and take the others back"
        " after the step in which they have joined again. For components that divide their work anew: `env` and"
        " `rollout` of recipe `embodied`. Batch sizes stay as configured. Default: false.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_rank_map(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        return {"placement": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        alone = handler.resolve_ref_schema(schema)
        alone.update({**RANK_MAP_SCHEMA, "type": ["object", *RANK_MAP_SCHEMA["type"]]})
        return schema

    @property
    def rank_map(self) -> RankMap:
        """The parsed rank map."""
        return self.placement


def _split_keys(entries: dict[str, PlacementEntry]) -> dict[str, PlacementEntry]:
    """Return one entry per component: `actor,rollout: 0-3` places both. The rules report duplicates."""
    single: dict[str, PlacementEntry] = {}
    for names, entry in entries.items():
        for name in split_names(names):
            single.setdefault(name, entry)
    return single


class EnvConfig(ConfigModel):
    """The software environment of some nodes of a group."""

    node_ranks: NodeRanksField = Field(
        description="Ranks of the nodes this applies to, a subset of the group's: `3`, `0-7`, `0-3,5`, a list,"
        " or `all` (the whole group)."
    )
    env_vars: EnvVars = Field(
        default=(),
        description="Environment variables of the group's processes on these nodes: a list of one-key maps, or a"
        " map. Values are taken as written (`2.50` stays `2.50`). A variable can be set once per node.",
    )
    python_interpreter_path: InterpreterPath | None = Field(
        default=None,
        description="Absolute path of the Python for the group's processes on these nodes. Default:"
        " `cluster.python_interpreter_path`, else Ray's interpreter there.",
    )


class DeclaredAccelerators(ConfigModel):
    """The accelerators of every node of a group, declared so that placements can be checked offline."""

    model: Line | None = Field(
        default=None, description="Model name, as in `A800`; compared with the model found. Default: any."
    )
    per_node: Annotated[Int, Field(ge=0, le=MAX_ACCELERATORS_PER_NODE)] = Field(
        description="Number per node; 0 for nodes without any."
    )
    memory_gib: Memory | None = Field(
        default=None,
        description="Memory of each in GiB, for `rlinf inspect memory`. Default: unknown.",
    )


_adapters: dict[type[RobotUnit], TypeAdapter[tuple[RobotUnit, ...]]] = {}


def _unit_adapter(model: type[RobotUnit]) -> TypeAdapter[tuple[RobotUnit, ...]]:
    if model not in _adapters:
        _adapters[model] = TypeAdapter(cast("type[tuple[RobotUnit, ...]]", tuple.__class_getitem__((model, ...))))
    return _adapters[model]


def _units(value: Any, info: ValidationInfo) -> tuple[RobotUnit, ...]:
    if not isinstance(value, list):
        raise expected("a list with one entry for each unit", value)
    type_name = info.data.get("type")
    if type_name is None:
        return ()  # the type was wrong and has been reported; without it the keys of a unit are unknown
    return _unit_adapter(hardware_model(type_name)).validate_python(value)


def _hardware_type(name: str) -> str:
    hardware_model(name)
    return name


class HardwareConfig(ConfigModel):
    """Hardware other than accelerators. A group that declares it counts only its units."""

    type: Annotated[Text, AfterValidator(_hardware_type)] = Field(
        description="Registered hardware type, as in `Franka`; it determines the keys of `configs`."
    )
    configs: Annotated[tuple[SerializeAsAny[RobotUnit], ...], PlainValidator(_units)] = Field(
        description="One entry for each unit, numbered from 0 by node and then in the order written."
    )


class SshConfig(ConfigModel):
    """Settings of the system's OpenSSH client. Unset ones are taken from `~/.ssh/config`."""

    user: SshWord | None = Field(
        default=None,
        description="Login name on nodes whose host names none, as `me@trainer3` does. Default: ssh's own choice.",
    )
    port: Annotated[Int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="TCP port of sshd. Default: ssh's own choice, usually 22."
    )
    identity_file: SshPath | None = Field(
        default=None, description="Private key file on this machine; `~` is your home. Default: ssh's own choice."
    )
    connect_timeout: Annotated[Float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="Seconds to wait for a connection. Default: 10."
    )
    options: SshOptions = Field(
        default_factory=dict[str, str],
        description="Additional options with their ssh_config names, as in `ProxyJump: gate`.",
    )

    def settings(self) -> Iterator[tuple[str, str, Path]]:
        """Yield each setting: its option of ssh in lower case, its value, and its path in the section."""
        for key, option in _SSH_KEYS.items():
            if (value := getattr(self, key)) is not None:
                yield option, str(value), (key,)
        yield from ((name.lower(), value, ("options", name)) for name, value in self.options.items())

    def over(self, base: SshConfig) -> SshConfig:
        """Return these settings over those of `base`, merged option by option, whatever the case of names."""
        own = {option for option, _, _ in self.settings()}
        kept = {key: getattr(self if option in own else base, key) for key, option in _SSH_KEYS.items()}
        options = {name: value for name, value in base.options.items() if name.lower() not in own}
        return base.model_copy(update={**kept, "options": {**options, **self.options}})


# The option of ssh that each key of `ssh` sets.
_SSH_KEYS: Final = {
    "user": "user",
    "port": "port",
    "identity_file": "identityfile",
    "connect_timeout": "connecttimeout",
}


class NodeGroup(ConfigModel):
    """Nodes with the same hardware, selected by one label."""

    label: Name = Field(
        description="Unique, case-sensitive name by which `component_placement` selects the group. `cluster` and"
        " `node` are reserved.",
        json_schema_extra={"not": {"enum": [*RESERVED_LABELS]}},
    )
    node_ranks: NodeRanksField = Field(
        description="Global ranks of the group's nodes: `3`, `0-7`, `0-3,5`, a list of such, or `all`."
    )
    env_configs: tuple[EnvConfig, ...] = Field(
        default=(),
        description="Software environments of processes placed through this group, by node; entries must not share a"
        " node.",
    )
    hardware: HardwareConfig | None = Field(
        default=None, description="Declared hardware other than accelerators, such as robots. Default: none."
    )
    ignore_hardware: Bool = Field(
        default=False, description="Count nodes, regardless of their hardware. Default: false. Excludes `hardware`."
    )
    hosts: Hosts = Field(
        default=(),
        description="Ssh destinations in rank order, a list or `trainer[00-07]`; as many as node ranks. Default: none.",
    )
    accelerators: DeclaredAccelerators | None = Field(
        default=None,
        description="Accelerators of each node. Allows checking ranges offline; on a live cluster the nodes must"
        " match. Default: unknown until the nodes are probed.",
    )
    memory_gib: Memory | None = Field(
        default=None,
        description="Memory of each node in GiB, checked by `rlinf doctor` and used by `rlinf inspect memory`; the"
        " minimum applies to nodes in several groups. Default: unknown.",
    )
    ssh: SshConfig | None = Field(
        default=None, description="Ssh settings for this group's nodes; override individual values of `cluster.ssh`."
    )


class ClusterConfig(ConfigModel):
    """The machines of a job and the placement of its components."""

    num_nodes: Annotated[Int, Field(ge=1, le=MAX_NODES)] = Field(
        description="Number of nodes, spares included; their ranks are 0 to num_nodes-1."
    )
    spare_nodes: Annotated[Int, Field(ge=0, le=MAX_NODES)] = Field(
        default=0,
        description="How many of `num_nodes`, those with the last ranks, are spares. No process is placed on a spare"
        " until a node is lost: the spare that is in the same node groups then serves under the lost node's rank, with"
        " the `env_configs` of its own. The head and nodes with robots cannot be replaced. Default: 0.",
    )
    component_placement: Annotated[dict[ComponentKey, PlacementEntry], AfterValidator(_split_keys)] = Field(
        default_factory=dict[str, PlacementEntry],
        description="Placement of each component's processes, by component name; comma-separated names share an entry.",
    )
    node_groups: tuple[NodeGroup, ...] = Field(
        default=(), description="Groups of equal nodes. Default: none; `cluster` and `node` always exist."
    )
    head_address: Address | None = Field(
        default=None,
        description="Address at which the other nodes reach the head (rank 0). Default: detected from its host.",
    )
    ports: Ports = Field(
        default=DEFAULT_PORTS,
        description="TCP ports that Ray and rlinf may listen on, first-last, on every node. Default: 20000-20999, below"
        " the ephemeral range.",
    )
    ssh: SshConfig = Field(
        default_factory=SshConfig,
        description="Ssh settings for the nodes: user, port, identity_file, connect_timeout, options.",
    )
    hosts: Hosts = Field(
        default=(),
        description="For a file without node groups: ssh destinations in rank order, the head first. Default: none.",
    )
    forward_env: tuple[VariableName, ...] = Field(
        default=(), description="Names of this machine's environment variables to forward to the nodes; no others are."
    )
    python_interpreter_path: InterpreterPath | None = Field(
        default=None,
        description="Absolute path of the Python for processes whose group sets none. Default: Ray's interpreter on"
        " the node.",
    )

    @property
    def num_active_nodes(self) -> int:
        """The number of nodes that are not spares; all nodes if the file makes all of them spares, an error."""
        return self.num_nodes - self.spare_nodes if self.spare_nodes < self.num_nodes else self.num_nodes

    @property
    def survives_losses(self) -> bool:
        """Whether the job may continue when a node is lost: on spares, or with fewer processes."""
        return self.spare_nodes > 0 or any(entry.elastic for entry in self.component_placement.values())

    @property
    def spare_ranks(self) -> range:
        """The ranks of the spares."""
        return range(self.num_active_nodes, self.num_nodes)


def groups_of(cluster: ClusterConfig, rank: int) -> frozenset[str]:
    """Return the labels of a node's groups."""
    return frozenset(group.label for group in cluster.node_groups if rank in group.node_ranks)


def has_robots(cluster: ClusterConfig, rank: int) -> bool:
    """Return whether a robot is attached to a node, or controlled from it."""
    units = (unit for group in cluster.node_groups if group.hardware for unit in group.hardware.configs)
    return any(
        rank == unit.node_rank or rank in (getattr(unit, field) for field in type(unit).node_ranks) for unit in units
    )


def can_replace(cluster: ClusterConfig, spare: int, rank: int) -> bool:
    """Return whether a spare can serve as node `rank`: both have the same groups and no robots, and `rank` is not 0.

    The head cannot be replaced because the driver and Ray's control service end with it.
    """
    return (
        rank in range(1, cluster.num_active_nodes)
        and groups_of(cluster, spare) == groups_of(cluster, rank)
        and not has_robots(cluster, rank)
        and not has_robots(cluster, spare)
    )


def replaceable(cluster: ClusterConfig, spare: int) -> tuple[int, ...]:
    """Return the ranks of the nodes that a spare can serve as."""
    return tuple(rank for rank in range(cluster.num_active_nodes) if can_replace(cluster, spare, rank))


def choose_spares(
    cluster: ClusterConfig, lost: Collection[int], spares: Collection[int], needed: Collection[int] = ()
) -> dict[int, int]:
    """Return the spare that serves as each lost node; lost nodes without a spare are left out.

    Lost nodes and spares are matched in ascending order, since any spare of the same groups will do.

    Args:
        cluster: the nodes.
        lost: ranks of nodes that do not serve.
        spares: ranks of spares that can be used.
        needed: ranks of lost nodes to replace first.
    """
    chosen: dict[int, int] = {}
    for rank in sorted(lost, key=lambda rank: (rank not in needed, rank)):
        free = (spare for spare in sorted(spares) if spare not in chosen.values())
        spare = next((spare for spare in free if can_replace(cluster, spare, rank)), None)
        if spare is not None:
            chosen[rank] = spare
    return chosen


class JobConfig(ConfigModel):
    """A whole file. A recipe adds its sections."""

    recipe: Text = Field(
        description="Recipe to train, a name listed by `rlinf train`, or your own as `package.module:name`. A file"
        " without it only describes machines."
    )
    cluster: ClusterConfig = Field(description="The machines, and the placement of components on them.")
