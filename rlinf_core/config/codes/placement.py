"""Codes of the stage `placement`: components on the units of node groups."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity


def _file(placement: str, groups: str = "", num_nodes: int = 2) -> Example:
    """Return a file with these lines under `component_placement` and these under `node_groups`."""
    text = f"cluster:\n  num_nodes: {num_nodes}\n  component_placement:\n{_indented(placement, 4)}"
    return Example(text + (f"  node_groups:\n{_indented(groups, 4)}" if groups else ""))


def _indented(lines: str, by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for line in lines.strip("\n").split("\n"))


_A800 = """
- label: a800
  node_ranks: 0-1
  accelerators: {per_node: 8}
"""
_TWO_GROUPS = """
- label: a800
  node_ranks: 0
  accelerators: {per_node: 8}
- label: cpu
  node_ranks: 1
  accelerators: {per_node: 0}
"""
_SHARING_GROUPS = """
- label: all
  node_ranks: 0-1
  accelerators: {per_node: 8}
- label: second
  node_ranks: 1
  accelerators: {per_node: 8}
"""
_FRANKA = """
- label: franka
  node_ranks: 0-1
  hardware:
    type: Franka
    configs:
"""

_ARMS = """
- label: arms
  node_ranks: 1
  hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.10.10.1}]}
"""


def _on(group: str, ranks: str) -> str:
    return f"actor: {{node_group: {group}, placement: '{ranks}'}}"


_ERRORS = (
    Code(
        "placement-out-of-range",
        Severity.ERROR,
        "a component asks for resources that its node group does not have",
        "Resource ranks count the units of the selected group: its robots if it declares `hardware`, else its "
        "accelerators, else its nodes. They start at 0 in every group and are numbered node by node, so on two nodes "
        "of 8 accelerators they are 0-15, whatever the ranks of the nodes. With several groups they run on in the "
        "order the groups are listed.",
        _file(_on("a800", "«0-16»"), _A800),
        _file(_on("a800", "0-15"), _A800),
    ),
    Code(
        "placement-not-ascending",
        Severity.ERROR,
        "the parts of a rank map go back, or name a resource twice",
        "The parts of a map name different resources, in ascending order. Process ranks follow that order. Several "
        "processes on one resource are written behind a colon: `0-1:0-3` puts two processes on each of two resources.",
        _file(_on("a800", "0-3,«3-15»"), _A800),
        _file(_on("a800", "0-3,4-15"), _A800),
    ),
    Code(
        "placement-counts-dont-divide",
        Severity.ERROR,
        "resources and processes of a part do not divide",
        "In a part `RESOURCES:PROCESSES` either every process holds the same number of consecutive resources, or the "
        "same number of processes share each resource. One of the two counts must be a multiple of the other.",
        _file(_on("a800", "«0-15:0-2»"), _A800),
        _file(_on("a800", "0-15:0-3"), _A800),
    ),
    Code(
        "process-ranks-gap",
        Severity.ERROR,
        "process ranks do not run on from 0 without gaps",
        "Over the whole map the process ranks are 0, 1, 2 and so on, each once and in ascending order. A part without "
        "a colon takes as many of the next ranks as it has resources.",
        _file(_on("a800", "0-7:0-7,«8-15:9-16»"), _A800),
        _file(_on("a800", "0-7:0-7,8-15:8-15"), _A800),
    ),
    Code(
        "process-spans-nodes",
        Severity.ERROR,
        "the resources of a process lie on two nodes",
        "A process runs on one node and can only hold what is attached to it. Where a node has 8 accelerators, shares "
        "of 1, 2, 4 or 8 that begin at a node's first accelerator never cross its border.",
        _file(_on("a800", "«4-15:0»"), _A800),
        _file(_on("a800", "0-15:0-1"), _A800),
    ),
    Code(
        "unknown-node-group",
        Severity.ERROR,
        "a component is placed on a node group that does not exist",
        "`node_group` takes the labels of `cluster.node_groups`, in the same case, and the two reserved ones: "
        "`cluster` (all nodes, with their accelerators) and `node` (all nodes, whatever they hold).",
        _file(_on("«A800»", "0-15"), _A800),
        _file(_on("a800", "0-15"), _A800),
    ),
    Code(
        "component-twice",
        Severity.ERROR,
        "a component is placed twice",
        "Each component has one entry, alone or in a key that joins several by commas. To place it on several ranges, "
        "list them in one map, as in `0-3,8-11`.",
        _file("actor,rollout: 0-15\n«rollout»: 0-7", _A800),
        _file("actor,rollout: 0-15\nenv: 0-7", _A800),
    ),
    Code(
        "groups-overlap",
        Severity.ERROR,
        "node groups selected together share units",
        "A component that selects several groups counts their units through, so each unit must belong to one of them "
        "only. Leave a group out, or narrow its `node_ranks`.",
        _file(_on('"all,«second»"', "0-15"), _SHARING_GROUPS),
        _file(_on("all", "0-15"), _SHARING_GROUPS),
    ),
    Code(
        "groups-mixed-units",
        Severity.ERROR,
        "node groups selected together count different things",
        "Resource ranks count robots where a group declares `hardware`, accelerators where one of its nodes has any, "
        "and nodes elsewhere. Ranks over groups that count different things would mean different things; place such "
        "a job as two components.",
        _file(_on('"a800,«cpu»"', "0-8"), _TWO_GROUPS),
        _file(_on("a800", "0-7"), _TWO_GROUPS),
    ),
    Code(
        "group-without-units",
        Severity.ERROR,
        "a component is placed on a node group that has no units",
        "A group that declares `hardware` counts the entries of `hardware.configs`, and this one has none. Declare "
        "them, or leave `hardware` out to count accelerators or nodes.",
        _file(_on("«franka»", "0"), _FRANKA.rstrip() + " []"),
        _file(_on("franka", "0"), _FRANKA + "      - {node_rank: 0, robot_ip: 10.10.10.1}"),
    ),
)

_SUSPICIOUS = (
    Code(
        "accelerators-unknown",
        Severity.NOTE,
        "nobody has said how many accelerators the nodes of a group have",
        "What a resource rank counts in this group depends on its accelerators, so the ranges of the components on it "
        "could not be checked here; everything else was. They are checked when the nodes can be asked. To check them "
        "now, declare `accelerators: {per_node: 8}` in the group, or give `--assume` with a number.",
        _file(_on("a800", "0-15"), "- label: «a800»\n  node_ranks: 0-1"),
        _file(_on("a800", "0-15"), _A800),
    ),
    Code(
        "no-accelerator-found",
        Severity.WARNING,
        "a component asks for accelerators by number, and its nodes have none",
        "Resource ranks count accelerators where the nodes have any, else the nodes themselves. These nodes were asked "
        "and have none, so that the component would run on their CPUs, one process a node. See that the driver is "
        "loaded and that no visibility variable hides the devices; name the group `node` if the CPU is meant.",
        Example(_file("actor: «0»", num_nodes=1).text, found=0),
        Example(_file("actor: {node_group: node, placement: 0}", num_nodes=1).text, found=0),
    ),
    Code(
        "idle-accelerators",
        Severity.WARNING,
        "accelerators that no component uses",
        "The group has accelerators, and no component is placed on some of them. That may be meant; often a range ends "
        "too early, or the number of nodes has grown since it was written.",
        _file(_on("a800", "0-7"), _A800.replace("a800", "«a800»")),
        _file(_on("a800", "all"), _A800),
    ),
    Code(
        "idle-robots",
        Severity.WARNING,
        "a group of robots that no component uses",
        "The group declares robots, and no component is placed on it: nothing moves them. Often the environments are"
        " placed on another group, or on `cluster` by default.",
        _file("env: {node_group: node, placement: 0}", _ARMS.replace("arms", "«arms»")),
        _file("env: {node_group: arms, placement: 0}", _ARMS),
    ),
    Code(
        "denser-placement",
        Severity.WARNING,
        "a component is placed at least twice as densely as its peers",
        "This component puts several processes on each accelerator, twice as many as any other component or more. They "
        "share its memory and its time. Check that this is meant, and that the map is not missing a part.",
        _file("actor: 0-15\nenv: «0-15:0-63»", _A800),
        _file("actor: 0-15\nenv: 0-15", _A800),
    ),
    Code(
        "partial-sharing",
        Severity.WARNING,
        "two components share some hardware, and each has some to itself",
        "Components are usually placed on the same resources and take turns, on separate ones and run at once, or one "
        "within the other. These two overlap in part, as happens when one range is widened and the other is not "
        "moved. The shared resources will be the bottleneck of both.",
        _file("actor: 0-8\nrollout: «8-15»", _A800),
        _file("actor: 0-7\nrollout: 8-15", _A800),
    ),
    Code(
        "env-configs-unused",
        Severity.NOTE,
        "the `env_configs` of a node's only group do not reach a component on it",
        "The `env_configs` of a group hold for the processes that are placed through that group, and for no other. "
        "This component is placed through `cluster` or `node`: its processes get neither the variables nor the "
        "interpreter of the group that their node is in. Name the group as its `node_group` if they should.",
        _file(
            _on("«node»", "1"),
            "- label: cpu\n  node_ranks: 1\n  accelerators: {per_node: 0}\n  env_configs:\n    - node_ranks: 1\n"
            "      env_vars: {OMP_NUM_THREADS: 4}",
        ),
        _file(
            _on("cpu", "0"),
            "- label: cpu\n  node_ranks: 1\n  accelerators: {per_node: 0}\n  env_configs:\n    - node_ranks: 1\n"
            "      env_vars: {OMP_NUM_THREADS: 4}",
        ),
    ),
    Code(
        "accelerators-not-reserved",
        Severity.NOTE,
        "a component sees accelerators that another one holds",
        "A process that is placed on a robot, or on a node as a whole, is given no accelerator and is kept from none: "
        "it sees all accelerators of its node. Another component was given some of them, and they share memory and "
        "time if both compute there. Place the component on accelerators of its own where that matters.",
        _file("actor: 0-15\nagent: {node_group: node, placement: «0»}", _A800),
        _file("actor: 0-7\nagent: {node_group: a800, placement: 8-15}", _A800),
    ),
    Code(
        "unused-interpreter",
        Severity.WARNING,
        "an interpreter is given for nodes on which the group places nobody",
        "`python_interpreter_path` says which Python runs the processes that are placed through this group, and no "
        "component has one on these nodes. The range of nodes, or the group of a component, is probably not what was "
        "meant.",
        _file(
            _on("node", "0"),
            "- label: cpu\n  node_ranks: 1\n  accelerators: {per_node: 0}\n  env_configs:\n    - node_ranks: 1\n"
            "      python_interpreter_path: «/opt/venv/bin/python3»",
        ),
        _file(
            _on("cpu", "0"),
            "- label: cpu\n  node_ranks: 1\n  accelerators: {per_node: 0}\n  env_configs:\n    - node_ranks: 1\n"
            "      python_interpreter_path: /opt/venv/bin/python3",
        ),
    ),
)

CODES: tuple[Code, ...] = (*_ERRORS, *_SUSPICIOUS)
