"""The plan of actions on each node, from the file and the nodes' facts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias, cast

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.progress import NodeFailure, Phase
from rlinf_core.errors import RLinfError
from rlinf_core.node.cluster_records import ClusterRecord

# Ray's logs and spilled objects need space; below this it fails with obscure errors.
_LEAST_DISK_BYTES: Final = 256 * 2**20
_LEAST_SHM_BYTES: Final = 100 * 2**20
_MOST_CONFLICTS: Final = 8

Facts: TypeAlias = Mapping[str, Any]


class Action(StrEnum):
    """The action on a node."""

    START = "start"
    KEEP = "keep"
    RESTART = "restart"
    """The node runs, but its head is gone."""


class LocalSoftware(NamedTuple):
    """The software of this machine, with which every node is compared.

    Attributes:
        fingerprints: the fingerprints of the rlinf and recipes code on this machine during this run; None if the code
            is synced.
        token_digest: the digest of the cluster's token; None without authentication.
        spec: cluster-wide settings, part of each node's record.
    """

    fingerprints: frozenset[str] | None
    token_digest: str | None
    spec: Facts


@dataclass(slots=True)
class NodeState:
    """A node on its way up.

    Attributes:
        facts: its facts, see `node_probe.probe`; None until it has answered.
        action: the chosen action; None before the choice, or if no action is possible.
        record: the record of its Ray once that is up, else None.
    """

    target: NodeTarget
    phase: Phase = Phase.CONNECT
    facts: Facts | None = None
    action: Action | None = None
    record: Facts | None = None

    @property
    def rank(self) -> int:
        return self.target.rank

    @property
    def running(self) -> Facts | None:
        """The record of the Ray that runs there, or None."""
        record = (self.facts or {}).get("record")
        return record if record and record.get("alive") else None

    def spec(self, own: LocalSoftware) -> dict[str, Any]:
        """Return the specification in its record."""
        return {**self.target.fingerprint(), **own.spec}


# The message, cause and remedy of a failure.
Fault: TypeAlias = tuple[str, str, str]


def decide(nodes: Sequence[NodeState], own: LocalSoftware) -> list[NodeFailure]:
    """Set the action of each node that answered and can be used, and return the failures of the others.

    Raises:
        RLinfError: a running node contradicts the file.
    """
    answered = [(node, node.facts) for node in nodes if node.facts is not None]
    _refuse_contradictions(nodes, own)
    head = next((node for node, _ in answered if node.target.is_head), None)
    by_machine: dict[str, NodeState] = {}
    failures: list[NodeFailure] = []
    for node, facts in answered:
        twin = by_machine.setdefault(str(facts["machine"]), node)
        fault = _same_machine(node, twin) or _software(node.target, facts, head.facts if head else None, own)
        action = _action(node, head)
        if fault is None and action is not Action.KEEP:
            fault = _room(facts)
        if fault is None:
            node.action = action
        else:
            failures.append(NodeFailure(node.rank, node.target.name, Phase.PROBE, *fault))
    return failures


def refuse_other_nodes(before: ClusterRecord | None, name: str, nodes: Sequence[NodeTarget], *, alone: bool) -> None:
    """Check that every running node of the cluster is still in the file, so that none is forgotten.

    Args:
        before: the record of the running cluster, or None.
        name: the name of the cluster.
        nodes: the nodes of the file.
        alone: whether each node is started by hand, so that none has a host.

    Raises:
        RLinfError: a running node is not in the file, or has another host there.
    """
    wanted = {node.rank: node.host for node in nodes}
    for node in before.nodes if before is not None else ():
        if node.process is None:
            continue
        if node.rank not in wanted:
            difference = f"node {node.rank} ({node.host or 'this machine'}) is up, the file has {len(wanted)} nodes"
        elif wanted[node.rank] != node.host and not alone:
            difference = f"node {node.rank} is up on {node.host or 'this machine'}, the file says {wanted[node.rank]}"
        else:
            continue
        raise RLinfError(
            f"the running cluster `{name}` does not match the file",
            why=difference,
            help=f"end it with `rlinf down --name {name}`, or use another `--name` for this one",
        )


def _action(node: NodeState, head: NodeState | None) -> Action:
    running = node.running
    if running is None:
        return Action.START
    of_head = head.running if head is not None else None
    if node.target.is_head or (of_head is not None and running.get("head_process") == of_head["process"]):
        return Action.KEEP
    return Action.RESTART


def _refuse_contradictions(nodes: Sequence[NodeState], own: LocalSoftware) -> None:
    conflicts = [f"{node.target.name}: {conflict}" for node in nodes for conflict in _conflicts(node, own)]
    if conflicts:
        omitted = len(conflicts) - _MOST_CONFLICTS
        listed = [*conflicts[:_MOST_CONFLICTS], *([f"and {omitted} more"] if omitted > 0 else [])]
        raise RLinfError(
            "the running nodes do not match the file",
            why="\n".join(listed),
            help="run `rlinf down` and `rlinf up` again, or correct the file",
        )


def _conflicts(node: NodeState, own: LocalSoftware) -> Iterator[str]:
    """Yield sentences on how a running node contradicts the file."""
    record = node.running
    if record is None:
        return
    before: Facts = record.get("spec") or {}
    same_mode = own.spec["authentication"] == before.get("authentication")
    if same_mode and record.get("token_digest") != own.token_digest:
        yield f"it was brought up from {record.get('from') or 'elsewhere'}, with another token"
        return
    for name, value in node.spec(own).items():
        if before.get(name) != value:
            yield f"`{name}` is {_shown(before.get(name))}, the file says {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(cast("list[str]", value)) or "none"
    return f"`{value}`"


def _same_machine(node: NodeState, twin: NodeState) -> Fault | None:
    if twin is node:
        return None
    return f"it is the same machine as {twin.target.name}", "", "list a separate machine for every node in `hosts`"


def _software(node: NodeTarget, facts: Facts, head: Facts | None, own: LocalSoftware) -> Fault | None:
    path, python, ray = node.interpreter, _version(facts["python"]), facts["ray"]
    of_head = head["ray"] if head else None
    if tuple(facts["python"][:2]) < (3, 11):
        help = "give its group another `python_interpreter_path`"
        return f"`{path}` is Python {python}", "rlinf needs 3.11 or newer", help
    if ray is None:
        why = facts.get("fault") or "the package is not installed there"
        return f"`{path}` has no ray", why, f"`{path} -m pip install {f'ray=={of_head}' if of_head else 'ray'}`"
    if head is not None and of_head and facts["python"][:2] != head["python"][:2]:
        return (
            f"`{path}` is Python {python}, the head runs {_version(head['python'])}",
            "Ray's processes exchange pickled objects, which requires one minor version of Python",
            "give its group an interpreter of the same minor version",
        )
    if of_head and ray != of_head:
        return (
            f"`{path}` has ray {ray}, the head runs {of_head}",
            "different versions of Ray cannot form a cluster",
            f"`{path} -m pip install ray=={of_head}`",
        )
    if own.fingerprints is None or facts["fingerprint"] in own.fingerprints:
        return None
    help = "install the same rlinf there, or copy it with `--sync`"
    if facts["fingerprint"] is None:
        return f"`{path}` has no rlinf", "", help
    place = facts.get("places", {}).get("rlinf_core", "")
    why = f"the code in {place} has fingerprint {facts['fingerprint']}, here {min(own.fingerprints)}"
    return "its rlinf differs from the one here", why, help


def _version(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def _room(facts: Facts) -> Fault | None:
    if facts["taken"]:
        name, port, process = facts["taken"][0]
        why = f"{process} listens on it; Ray needs it as its {str(name).replace('_', ' ')} port"
        return f"port {port} is taken", why, "set other ports as `cluster.ports` in the file, or end that process"
    if facts["disk_free"] < _LEAST_DISK_BYTES:
        why = f"{facts['disk_free'] >> 20} MiB free for {facts['folder']}, Ray needs {_LEAST_DISK_BYTES >> 20}"
        return "the disk is full", why, "free some space on it"
    if facts["shm_free"] < _LEAST_SHM_BYTES:
        why = f"{facts['shm_free'] >> 20} MiB free for /dev/shm, Ray needs {_LEAST_SHM_BYTES >> 20}"
        help = "free some space in it, or start the container with a larger one"
        return "/dev/shm is full or too small", why, help
    return None
