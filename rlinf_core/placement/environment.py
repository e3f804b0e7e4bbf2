"""The interpreter and the variables that a file sets for a process, by its node and group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlinf_core.config.machines.cluster import ClusterConfig, NodeGroup
from rlinf_core.config.tree import Path
from rlinf_core.errors import ConfigError

# Search paths. A value for one is prepended to the node's own: replacing it would hide the node's CUDA, Python packages
# or ROS.
PATH_LISTS: Final = frozenset(
    (
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "PKG_CONFIG_PATH",
        "CMAKE_PREFIX_PATH",
        "MANPATH",
        "INFOPATH",
        "XDG_DATA_DIRS",
        "XDG_CONFIG_DIRS",
        "ROS_PACKAGE_PATH",
        "AMENT_PREFIX_PATH",
        "COLCON_PREFIX_PATH",
        "GST_PLUGIN_PATH",
        "QT_PLUGIN_PATH",
        "GZ_SIM_RESOURCE_PATH",
        "GAZEBO_MODEL_PATH",
        "PERL5LIB",
        "NODE_PATH",
    )
)
_CLUSTER_INTERPRETER: Final[Path] = ("cluster", "python_interpreter_path")


@dataclass(frozen=True, slots=True)
class GroupVariable:
    """A variable that the `env_configs` of node group `group` set for its processes on a node.

    Attributes:
        path, index: the path of its `env_vars`, and its index there.
    """

    name: str
    value: str
    group: str
    path: Path
    index: int


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """The variables and the interpreter that a file sets for a process.

    Attributes:
        forwarded: the names of the variables forwarded from the driver.
        variables: the group's variables, in file order; they override forwarded ones.
        interpreter: the absolute path of the Python, or None for Ray's interpreter on the node.
        interpreter_path, interpreter_group: its path in the file, and the label of the group that sets it.
    """

    forwarded: tuple[str, ...] = ()
    variables: tuple[GroupVariable, ...] = ()
    interpreter: str | None = None
    interpreter_path: Path | None = None
    interpreter_group: str | None = None

    def values(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with their values, with forwarded ones from `environ`.

        Raises:
            ConfigError: a forwarded variable is not set.
        """
        return {
            **forwarded_values(self.forwarded, environ),
            **{variable.name: variable.value for variable in self.variables},
        }


def process_environment(cluster: ClusterConfig, node_rank: int, label: str) -> ProcessEnvironment:
    """Return the environment of group `label`'s processes on a node; `cluster` and `node` have none."""
    forwarded = cluster.forward_env
    for index, group in enumerate(cluster.node_groups):
        if group.label == label:
            own = _given_by(group, ("cluster", "node_groups", index), node_rank, forwarded)
            if own is not None:
                return own if own.interpreter else _with_default(own, cluster)
    return _with_default(ProcessEnvironment(forwarded), cluster)


def _given_by(group: NodeGroup, path: Path, node_rank: int, forwarded: tuple[str, ...]) -> ProcessEnvironment | None:
    """Return a group's `env_configs` entry for a node, or None. A valid file has at most one per node."""
    if node_rank not in group.node_ranks:
        return None
    for index, config in enumerate(group.env_configs):
        if node_rank not in config.node_ranks:
            continue
        at: Path = (*path, "env_configs", index)
        variables = tuple(
            GroupVariable(name, value, group.label, (*at, "env_vars"), position)
            for position, (name, value) in enumerate(config.env_vars)
        )
        if config.python_interpreter_path is None:
            return ProcessEnvironment(forwarded, variables)
        return ProcessEnvironment(
            forwarded, variables, config.python_interpreter_path, (*at, "python_interpreter_path"), group.label
        )
    return None


def ray_interpreter(cluster: ClusterConfig, node_rank: int) -> str | None:
    """Return the interpreter with which `rlinf up` starts Ray on a node; None for the path of its own.

    It is the one that the node's groups name, if they agree, else that of the cluster.
    """
    named: dict[str, None] = {}
    for index, group in enumerate(cluster.node_groups):
        own = _given_by(group, ("cluster", "node_groups", index), node_rank, ())
        if own is not None and own.interpreter is not None:
            named.setdefault(own.interpreter)
    return next(iter(named)) if len(named) == 1 else cluster.python_interpreter_path


def _with_default(environment: ProcessEnvironment, cluster: ClusterConfig) -> ProcessEnvironment:
    if cluster.python_interpreter_path is None:
        return environment
    return ProcessEnvironment(
        environment.forwarded, environment.variables, cluster.python_interpreter_path, _CLUSTER_INTERPRETER
    )


def forwarded_values(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `cluster.forward_env` names.

    Raises:
        ConfigError: one of them is not set.
    """
    unset = [name for name in names if name not in environ]
    if unset:
        listed = ", ".join(f"`{name}`" for name in unset)
        raise ConfigError(
            f"`cluster.forward_env` names {listed}, which {'is' if len(unset) == 1 else 'are'} not set here",
            help="set it before this command, or remove it from the file",
        )
    return {name: environ[name] for name in names}
