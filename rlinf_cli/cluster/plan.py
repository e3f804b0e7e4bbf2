"""The plan of actions on each node, from the file and the nodes' facts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, cast

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.phases import NodeFailure, Phase
from rlinf_core.errors import RLinfError
from rlinf_core.node.cluster_records import ClusterRecord

# Ray's logs and spilled objects need space; below this it fails with obscure errors.
_LEAST_DISK_BYTES: Final = 256 * 2**20
_LEAST_SHM_BYTES: Final = 100 * 2**20


class Action(StrEnum):
    """The action that is taken on a node."""

    START = "start"
    KEEP = "keep"
    RESTART = "restart"
    """It runs, but its head is gone."""


class Own(NamedTuple):
    """The software of this machine, the reference for every node.

    Attributes:
        fingerprints: the fingerprints of the rlinf and recipes code on this machine during this run; None if the code
            is synced.
        token_digest: the digest of the cluster's token; None without authentication.
        spec: cluster-wide settings, part of each node's record.
    """

    fingerprints: frozenset[str] | None
    token_digest: str | None
    spec: Mapping[str, Any]


class NodeActions(NamedTuple):
    """The actions on usable nodes, and the failures of the others."""

    actions: dict[int, Action]
    failures: list[NodeFailure]


def decide(nodes: Sequence[NodeTarget], facts: Mapping[int, Mapping[str, Any]], own: Own) -> NodeActions:
    """Return the action for each node.

    Args:
        nodes: the nodes by rank.
        facts: the facts of each node that answered; see `node_probe.probe`.
        own: the reference for comparisons.

    Raises:
        RLinfError: a running node contradicts the file.
    """
    _refuse_contradictions(nodes, facts, own)
    actions: dict[int, Action] = {}
    failures: list[NodeFailure] = []
    head = facts.get(0)
    target_by_host: dict[str, NodeTarget] = {}
    head_keeps = head is not None and _runs(head)
    for node in nodes:
        node_facts = facts.get(node.rank)
        if node_facts is None:
            continue
        twin = target_by_host.setdefault(str(node_facts["machine"]), node)
        failure = _same_machine(node, twin) or _software(node, node_facts, head, own)
        if failure is None:
            action = _action(node_facts, head, head_keeps=head_keeps, is_head=node.is_head)
            failure = None if action is Action.KEEP else _room(node, node_facts)
            if failure is None:
                actions[node.rank] = action
        if failure is not None:
            failures.append(failure)
    return NodeActions(actions, failures)


def refuse_other_nodes(before: ClusterRecord | None, name: str, nodes: Sequence[NodeTarget], *, alone: bool) -> None:
    """Check that no running node would be forgotten because it is no longer in the file.

    Args:
        before: the recorded nodes.
        name: the name of the cluster.
        nodes: the nodes of the file.
        alone: whether each node is started by hand, so that none has a host.

    Raises:
        RLinfError: a node that is up is not in the file, or elsewhere.
    """
    if before is None:
        return
    wanted = {node.rank: node.host for node in nodes}
    for node in before.nodes:
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


def spec_of(node: NodeTarget, own: Own) -> dict[str, Any]:
    """Return the specification in a node's record."""
    return {**node.fingerprint(), **own.spec}


def _runs(node_facts: Mapping[str, Any]) -> bool:
    record = node_facts.get("record")
    return bool(record and record.get("alive"))


def _action(
    node_facts: Mapping[str, Any], head: Mapping[str, Any] | None, *, head_keeps: bool, is_head: bool
) -> Action:
    if not _runs(node_facts):
        return Action.START
    if is_head:
        return Action.KEEP
    same_head = (
        head is not None and head_keeps and node_facts["record"].get("head_process") == head["record"]["process"]
    )
    return Action.KEEP if same_head else Action.RESTART


def _refuse_contradictions(nodes: Sequence[NodeTarget], facts: Mapping[int, Mapping[str, Any]], own: Own) -> None:
    conflicts: list[str] = []
    for node in nodes:
        node_facts = facts.get(node.rank)
        if node_facts is None or not _runs(node_facts):
            continue
        record = node_facts["record"]
        if record.get("token_digest") != own.token_digest and own.spec["authentication"] == record.get("spec", {}).get(
            "authentication"
        ):
            conflicts.append(
                f"{node.name}: it was brought up from {record.get('from') or 'elsewhere'}, with another token"
            )
            continue
        conflicts += [
            f"{node.name}: {difference}" for difference in _differences(record.get("spec") or {}, spec_of(node, own))
        ]
    if conflicts:
        omitted = [f"and {len(conflicts) - 8} more"] if len(conflicts) > 8 else []
        raise RLinfError(
            "the running nodes do not match the file",
            why="\n".join([*conflicts[:8], *omitted]),
            help="run `rlinf down` and `rlinf up` again, or correct the file",
        )


def _differences(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    differences: list[str] = []
    for name in wanted:
        before, now = running.get(name), wanted[name]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            old, new = cast("dict[str, str]", before), cast("dict[str, str]", now)
            changed = [f"`{key}`" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            differences.append(f"`{name}` differ in {', '.join(changed)}")
        else:
            differences.append(f"`{name}` is {_shown(before)}, the file says {_shown(now)}")
    return differences


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(cast("list[str]", value)) or "none"
    return f"`{value}`"


def _same_machine(node: NodeTarget, twin: NodeTarget) -> NodeFailure | None:
    if twin is node:
        return None
    return NodeFailure(
        node.rank,
        node.name,
        Phase.PROBE,
        f"it is the same machine as {twin.name}",
        help="list a separate machine for every node in `hosts`",
    )


def _software(
    node: NodeTarget, node_facts: Mapping[str, Any], head: Mapping[str, Any] | None, own: Own
) -> NodeFailure | None:
    def failure(message: str, why: str, help: str) -> NodeFailure:
        return NodeFailure(node.rank, node.name, Phase.PROBE, message, why, help)

    path = node.interpreter
    python, ray = _version(node_facts["python"]), node_facts["ray"]
    if tuple(node_facts["python"][:2]) < (3, 11):
        return failure(
            f"`{path}` is Python {python}",
            "rlinf needs 3.11 or newer",
            "give its group another `python_interpreter_path`",
        )
    if ray is None:
        of_head = head["ray"] if head and head["ray"] else None
        return failure(
            f"`{path}` has no ray",
            node_facts.get("fault") or "the package is not installed there",
            f"`{path} -m pip install {f'ray=={of_head}' if of_head else 'ray'}`",
        )
    if head is not None and head is not node_facts and head["ray"]:
        if node_facts["python"][:2] != head["python"][:2]:
            return failure(
                f"`{path}` is Python {python}, the head runs {_version(head['python'])}",
                "Ray's processes exchange pickled objects, which requires one minor version of Python",
                "give its group an interpreter of the same minor version",
            )
        if ray != head["ray"]:
            return failure(
                f"`{path}` has ray {ray}, the head runs {head['ray']}",
                "different versions of Ray cannot form a cluster",
                f"`{path} -m pip install ray=={head['ray']}`",
            )
    if own.fingerprints is not None and node_facts["fingerprint"] not in own.fingerprints:
        if node_facts["fingerprint"] is None:
            return failure(f"`{path}` has no rlinf", "", "install the same rlinf there, or copy it with `--sync`")
        place = node_facts.get("places", {}).get("rlinf_core", "")
        return failure(
            "its rlinf differs from the one here",
            f"the code in {place} has fingerprint {node_facts['fingerprint']}, here {min(own.fingerprints)}",
            "install the same rlinf there, or copy it with `--sync`",
        )
    return None


def _version(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def _room(node: NodeTarget, node_facts: Mapping[str, Any]) -> NodeFailure | None:
    if node_facts["taken"]:
        name, port, process = node_facts["taken"][0]
        return NodeFailure(
            node.rank,
            node.name,
            Phase.PROBE,
            f"port {port} is taken",
            f"{process} listens on it; Ray needs it as its {str(name).replace('_', ' ')} port",
            "set other ports as `cluster.ports` in the file, or end that process",
        )
    for free, least, what in (
        (node_facts["disk_free"], _LEAST_DISK_BYTES, node_facts["folder"]),
        (node_facts["shm_free"], _LEAST_SHM_BYTES, "/dev/shm"),
    ):
        if free < least:
            return NodeFailure(
                node.rank,
                node.name,
                Phase.PROBE,
                "the disk is full" if what != "/dev/shm" else "/dev/shm is full or too small",
                f"{free >> 20} MiB free for {what}, Ray needs {least >> 20}",
                "free some space on it"
                if what != "/dev/shm"
                else "free some space in it, or start the container with a larger one",
            )
    return None
