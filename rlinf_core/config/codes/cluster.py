"""Codes of the stage `cluster`: the values of the `cluster` section against each other."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity


def _code(name: str, severity: Severity, title: str, meaning: str, wrong: str, right: str) -> Code:
    return Code(name, severity, title, meaning, Example(wrong), Example(right))


def _error(name: str, title: str, meaning: str, wrong: str, right: str) -> Code:
    return _code(name, Severity.ERROR, title, meaning, wrong, right)


def _warning(name: str, title: str, meaning: str, wrong: str, right: str) -> Code:
    return _code(name, Severity.WARNING, title, meaning, wrong, right)


def _groups(text: str, num_nodes: int = 4) -> str:
    """Return a file with these node groups."""
    lines = "".join(f"    {line}\n" for line in text.strip("\n").split("\n"))
    return f"cluster:\n  num_nodes: {num_nodes}\n  node_groups:\n{lines}"


def _group(text: str) -> str:
    """Return a file with one node group, of all four nodes, that holds this besides."""
    lines = "".join(f"\n  {line}" for line in text.strip("\n").split("\n"))
    return _groups(f"- label: a800\n  node_ranks: 0-3{lines}")


def _env_vars(*variables: str) -> str:
    """Return a file in which all nodes have these variables."""
    return _group(
        "env_configs:\n  - node_ranks: 0-3\n    env_vars:" + "".join(f"\n      - {each}" for each in variables)
    )


_GROUPS = (
    _error(
        "node-rank-out-of-range",
        "a node rank is beyond the last node",
        "Node ranks count from 0, so `num_nodes: 4` has the ranks 0-3. Either the ranks are one too high, or "
        "`num_nodes` is too low.",
        _groups("- label: a800\n  node_ranks: «0-4»"),
        _groups("- label: a800\n  node_ranks: 0-3"),
    ),
    _error(
        "node-ranks-order",
        "node ranks go back or repeat",
        "The resources of a group are numbered node by node in ascending rank, whatever order the ranks are written "
        "in. So that nobody counts on another order, they are written ascending, and each once.",
        _groups("- label: a800\n  node_ranks: 2-3,«0-1»"),
        _groups("- label: a800\n  node_ranks: 0-1,2-3"),
    ),
    _error(
        "duplicate-label",
        "two node groups have the same label",
        "Components select a group by its label, so each label belongs to one group. Labels are case sensitive.",
        _groups("- {label: a800, node_ranks: 0-1}\n- {label: «a800», node_ranks: 2-3}"),
        _groups("- {label: a800, node_ranks: 0-1}\n- {label: h100, node_ranks: 2-3}"),
    ),
    _error(
        "reserved-label",
        "the labels `cluster` and `node` always exist",
        "`cluster` is every node with its accelerators, and what a component gets that names no group. `node` is every "
        "node, whatever it holds. Neither can be redefined.",
        _groups("- {label: «node», node_ranks: 0-3}"),
        _groups("- {label: nodes, node_ranks: 0-3}"),
    ),
    _error(
        "accelerators-conflict",
        "two groups declare different accelerators for one node",
        "A node may be in several groups, but it has one set of accelerators: groups that share a node declare the "
        "same.",
        _groups(
            "- {label: a, node_ranks: 0-1, accelerators: {per_node: 8}}\n"
            "- {label: b, node_ranks: 1-3, «accelerators»: {per_node: 4}}"
        ),
        _groups(
            "- {label: a, node_ranks: 0-1, accelerators: {per_node: 8}}\n"
            "- {label: b, node_ranks: 1-3, accelerators: {per_node: 8}}"
        ),
    ),
)

_LIVE = (
    Code(
        "accelerators-differ",
        Severity.ERROR,
        "nodes do not have the accelerators that their group declares",
        "With `--live` the nodes are asked. `per_node` must be the number that is found, and `model` a part of the "
        "name that is. Either a node is not in order, or the file describes another one. A visibility variable such "
        "as `CUDA_VISIBLE_DEVICES` of a node hides accelerators from it.",
        Example(_groups("- {label: a800, node_ranks: 0-3, «accelerators»: {per_node: 8}}"), found=4),
        Example(_groups("- {label: a800, node_ranks: 0-3, accelerators: {per_node: 4}}"), found=4),
    ),
)

_ENVIRONMENT = (
    _error(
        "env-config-outside-group",
        "an `env_configs` entry names a node that its group does not have",
        "The `node_ranks` of an entry are a part of its group's; they are ranks in the cluster, not positions in the "
        "group.",
        _groups("- label: b\n  node_ranks: 2-3\n  env_configs:\n    - node_ranks: «0-1»\n      env_vars: [A: 1]"),
        _groups("- label: b\n  node_ranks: 2-3\n  env_configs:\n    - node_ranks: 2-3\n      env_vars: [A: 1]"),
    ),
    _error(
        "env-config-overlap",
        "two `env_configs` entries of a group share a node",
        "Each node of a group has one software environment, so no two entries of a group name the same node.",
        _group("env_configs:\n  - {node_ranks: 0-1, env_vars: [A: 1]}\n  - {node_ranks: «1-3», env_vars: [B: 1]}"),
        _group("env_configs:\n  - {node_ranks: 0-1, env_vars: [A: 1]}\n  - {node_ranks: 2-3, env_vars: [B: 1]}"),
    ),
    _warning(
        "env-config-empty",
        "an `env_configs` entry sets nothing",
        "It has neither `env_vars` nor `python_interpreter_path`, so it could as well be left out.",
        _group("env_configs:\n  - «node_ranks: 0-1»"),
        _group("env_configs:\n  - node_ranks: 0-1\n    env_vars: [A: 1]"),
    ),
    _error(
        "duplicate-env-var",
        "a variable is set twice for the same nodes",
        "Within one entry each variable is given once. The same variable with different values on different nodes is "
        "fine: give each set of nodes an entry of its own.",
        _env_vars("NCCL_DEBUG: INFO", "«NCCL_DEBUG»: WARN"),
        _env_vars("NCCL_DEBUG: WARN"),
    ),
    _warning(
        "env-var-of-process",
        "the variable belongs to each process, not to a node",
        "rlinf sets ranks, world sizes, the rendezvous address and the visible devices for each process by itself. A "
        "value for a whole node, or one forwarded from this machine, would override them with something wrong.",
        _env_vars("«CUDA_VISIBLE_DEVICES»: 0,1"),
        _env_vars("NCCL_DEBUG: INFO"),
    ),
    _warning(
        "env-var-not-expanded",
        "the value looks as if a shell would read it",
        "Values go to the processes as they are written: `$HOME` and `~` mean nothing there. `PATH`, `PYTHONPATH`, "
        "`LD_LIBRARY_PATH` and their like are put before the node's own value, so `:$PATH` behind them is not needed. "
        "`${env:NAME}` is replaced by this machine's variable when the file is read.",
        _env_vars("PATH: «/opt/cuda/bin:$PATH»"),
        _env_vars("PATH: /opt/cuda/bin"),
    ),
    _warning(
        "secret-in-file",
        "a secret stands in the file",
        "Names such as `*_TOKEN`, `*_KEY` and `*PASSWORD*` look secret; their values are masked wherever rlinf prints "
        "them, but the file itself is read, copied and committed. Let it refer to this machine's environment instead.",
        _env_vars("«HF_TOKEN»: hf_abcdefgh"),
        "cluster:\n  num_nodes: 4\n  forward_env: [HF_TOKEN]\n",
    ),
)

_HARDWARE = (
    _error(
        "hardware-and-ignore",
        "a group declares hardware and ignores it",
        "A group with `hardware` counts its units; one with `ignore_hardware: true` counts nodes. It cannot do both.",
        _group("hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1}]}\nignore_hardware: «true»"),
        _group("hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1}]}"),
    ),
    _warning(
        "hardware-empty",
        "a group declares hardware without a unit",
        "A group with `hardware` counts nothing but the units in its `configs`, so nothing can be placed on this one.",
        _group("hardware:\n  type: Franka\n  «configs»: []"),
        _group("hardware:\n  type: Franka\n  configs: [{node_rank: 0, robot_ip: 10.0.0.1}]"),
    ),
    _error(
        "hardware-outside-group",
        "a unit is attached to a node that its group does not have",
        "`node_rank` is the rank in the cluster of the node that the unit is attached to, and that node is in the "
        "group.",
        _groups(
            "- label: arms\n  node_ranks: 2-3\n  hardware:\n    type: Franka\n"
            "    configs: [{node_rank: «0», robot_ip: 10.0.0.1}]"
        ),
        _groups(
            "- label: arms\n  node_ranks: 2-3\n  hardware:\n    type: Franka\n"
            "    configs: [{node_rank: 2, robot_ip: 10.0.0.1}]"
        ),
    ),
    _error(
        "hardware-in-two-groups",
        "two groups declare the same type of hardware on one node",
        "Units are numbered within their group. If two groups declared the units of a type on one node, nobody could "
        "tell whose numbers hold there.",
        _groups(
            "- {label: a, node_ranks: 0-1, hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.1}]}}\n"
            "- {label: b, node_ranks: 1-2, hardware: {type: Franka, configs: [{node_rank: «1», robot_ip: 10.0.0.2}]}}"
        ),
        _groups(
            "- {label: a, node_ranks: 0-1, hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.1}]}}\n"
            "- {label: b, node_ranks: 1-2, hardware: {type: Franka, configs: [{node_rank: 2, robot_ip: 10.0.0.2}]}}"
        ),
    ),
    _error(
        "hardware-shared",
        "two units have the same address or serial number",
        "A robot's address and a camera's serial number belong to one unit. Two processes that drive one arm without "
        "knowing of each other are dangerous.",
        _group(
            "hardware:\n  type: Franka\n  configs:\n    - {node_rank: 0, robot_ip: 10.0.0.1}\n"
            "    - {node_rank: 1, robot_ip: «10.0.0.1»}"
        ),
        _group(
            "hardware:\n  type: Franka\n  configs:\n    - {node_rank: 0, robot_ip: 10.0.0.1}\n"
            "    - {node_rank: 1, robot_ip: 10.0.0.2}"
        ),
    ),
)

_MACHINES = (
    _error(
        "hosts-count",
        "there are more or fewer hosts than nodes",
        "Hosts stand in rank order, one for each node of the group; `cluster.hosts` has one for each node of the "
        "cluster.",
        _group("hosts: «trainer[0-2]»"),
        _group("hosts: trainer[0-3]"),
    ),
    _error(
        "hosts-twice",
        "hosts are given both for the cluster and for its groups",
        "`cluster.hosts` is for a file whose groups name no hosts. With both, a node could have two.",
        "cluster:\n  num_nodes: 2\n  «hosts»: m[0-1]\n  node_groups: [{label: a, node_ranks: 0-1, hosts: [a0, a1]}]\n",
        "cluster:\n  num_nodes: 2\n  node_groups: [{label: a, node_ranks: 0-1, hosts: [a0, a1]}]\n",
    ),
    _error(
        "host-conflict",
        "two groups give one node different hosts",
        "A node may be in several groups, but it is one machine.",
        _groups("- {label: a, node_ranks: 0-1, hosts: [m0, m1]}\n- {label: b, node_ranks: 1-3, hosts: [«m9», m2, m3]}"),
        _groups("- {label: a, node_ranks: 0-1, hosts: [m0, m1]}\n- {label: b, node_ranks: 1-3, hosts: [m1, m2, m3]}"),
    ),
    _error(
        "duplicate-host",
        "one host is two nodes",
        "Every node is a machine of its own: two of them on one host would fight for its accelerators and ports.",
        _group("hosts: [m0, m1, m2, «m1»]"),
        _group("hosts: [m0, m1, m2, m3]"),
    ),
    _warning(
        "node-without-host",
        "some nodes have a host and others have none",
        "`rlinf up` starts the nodes that have a host. The others must be started by hand, with `rlinf up "
        "--node-rank`.",
        "cluster:\n  num_nodes: «3»\n  node_groups: [{label: a, node_ranks: 0-1, hosts: [a0, a1]}]\n",
        "cluster:\n  num_nodes: 2\n  node_groups: [{label: a, node_ranks: 0-1, hosts: [a0, a1]}]\n",
    ),
    _error(
        "head-address-local",
        "the head's address is this machine's alone",
        "`head_address` is where the other nodes reach node 0. A loopback address means every node itself.",
        "cluster:\n  num_nodes: 2\n  head_address: «127.0.0.1»\n",
        "cluster:\n  num_nodes: 2\n  head_address: 10.0.0.1\n",
    ),
    _warning(
        "ports-ephemeral",
        "the ports are among those that outgoing connections use",
        "Linux takes the local ports of outgoing connections from 32768-60999 unless told otherwise, so any program "
        "may happen to sit on one of these when Ray wants it.",
        "cluster:\n  num_nodes: 1\n  ports: «40000-40999»\n",
        "cluster:\n  num_nodes: 1\n  ports: 20000-20999\n",
    ),
)

CODES: tuple[Code, ...] = (*_GROUPS, *_LIVE, *_ENVIRONMENT, *_HARDWARE, *_MACHINES)
