"""The environments of processes: the interpreter and the variables that a file sets for them, by node and group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from rlinf_core.config.sections.cluster import ClusterConfig, EnvConfig
from rlinf_core.config.tree import Path
from rlinf_core.errors import ConfigError
from rlinf_core.suggest import quoted

# Search paths. A value for one is prepended to the node's own: replacing it would hide the node's CUDA, Python packages
# or ROS.
PATH_LISTS: Final = frozenset(
    (
        *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH"),
        *("CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "MANPATH", "INFOPATH", "XDG_DATA_DIRS"),
        *("XDG_CONFIG_DIRS", "ROS_PACKAGE_PATH", "AMENT_PREFIX_PATH", "COLCON_PREFIX_PATH", "GST_PLUGIN_PATH"),
        *("QT_PLUGIN_PATH", "GZ_SIM_RESOURCE_PATH", "GAZEBO_MODEL_PATH", "PERL5LIB", "NODE_PATH"),
    )
)
_CLUSTER_INTERPRETER: Final[Path] = ("cluster", "python_interpreter_path")


class ProcessEnvironment(NamedTuple):
    """The variables and the interpreter that a file sets for a process.

    Attributes:
        forwarded: the names of the variables forwarded from the driver.
        variables: the group's variables with their values, in file order; they override forwarded ones.
        group, path: the label of the group whose `env_configs` set them, and the path of the entry; None without one.
        interpreter: the absolute path of the Python, or None for Ray's interpreter on the node.
        interpreter_path: its path in the file.
    """

    forwarded: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    group: str | None = None
    path: Path = ()
    interpreter: str | None = None
    interpreter_path: Path | None = None

    @property
    def interpreter_group(self) -> str | None:
        """The label of the group that sets the interpreter, or None."""
        return None if self.interpreter_path in (None, _CLUSTER_INTERPRETER) else self.group

    def values(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return all variables with their values, taking forwarded ones from `environ`.

        Raises:
            ConfigError: a forwarded variable is not set.
        """
        return {**forwarded_values(self.forwarded, environ), **dict(self.variables)}


def process_environment(cluster: ClusterConfig, node_rank: int, label: str) -> ProcessEnvironment:
    """Return the environment of group `label`'s processes on a node; `cluster` and `node` have none."""
    default = cluster.python_interpreter_path
    environment = ProcessEnvironment(
        cluster.forward_env, interpreter=default, interpreter_path=_CLUSTER_INTERPRETER if default else None
    )
    for group, path, config in _entries(cluster, node_rank):
        if group == label:
            environment = environment._replace(variables=config.env_vars, group=group, path=path)
            own = config.python_interpreter_path
            at = (*path, "python_interpreter_path")
            return environment._replace(interpreter=own, interpreter_path=at) if own else environment
    return environment


def _entries(cluster: ClusterConfig, node_rank: int) -> Iterator[tuple[str, Path, EnvConfig]]:
    """Yield the `env_configs` entries for a node, at most one per group, each with its group's label and path."""
    for number, group in enumerate(cluster.node_groups):
        for index, config in enumerate(group.env_configs if node_rank in group.node_ranks else ()):
            if node_rank in config.node_ranks:
                yield group.label, ("cluster", "node_groups", number, "env_configs", index), config


def ray_interpreter(cluster: ClusterConfig, node_rank: int) -> str | None:
    """Return the interpreter with which `rlinf up` starts Ray on a node; None for the path of this interpreter.

    It is the one that the node's groups name, if they agree, else that of the cluster.
    """
    named = {config.python_interpreter_path for _, _, config in _entries(cluster, node_rank)} - {None}
    return named.pop() if len(named) == 1 else cluster.python_interpreter_path


def forwarded_values(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `cluster.forward_env` names.

    Raises:
        ConfigError: one of them is not set.
    """
    unset = [name for name in names if name not in environ]
    if unset:
        listed = quoted(unset)
        raise ConfigError(
            f"`cluster.forward_env` names {listed}, which {'is' if len(unset) == 1 else 'are'} not set here",
            help="set it before this command, or remove it from the file",
        )
    return {name: environ[name] for name in names}
