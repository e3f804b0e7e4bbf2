"""Checks of access to the cluster, and that each node is a separate machine."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode


def machines(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that no two nodes are the same machine."""
    first: dict[str, ProbedNode] = {}
    findings: list[Finding] = []
    for machine in probed:
        twin = first.setdefault(str(machine.facts["machine"]), machine)
        if twin is not machine:
            what = f"it is the same machine as {twin.node.name}"
            help = "list a separate machine for every node in `hosts`"
            findings.append(machine.finding("machine", CheckVerdict.FAULT, what, help))
    return findings


def head_address(probed: Sequence[ProbedNode], address: str | None) -> list[Finding]:
    """Check that the head is not reachable from the internet: Ray's ports are open on every interface of a node.

    Args:
        probed: the nodes.
        address: where the head will listen; None if unknown.
    """
    head = next((machine for machine in probed if machine.node.is_head), None)
    if head is None or address is None:
        return []
    try:
        parsed = ip_address(address)
    except ValueError:
        return []  # a name: the nodes resolve it
    # Documentation and carrier-grade NAT ranges are not private either, and get the same finding.
    if parsed.is_global:
        what = f"the head's address {address} is reachable from the internet"
        help = "restrict `cluster.ports` to the nodes with a firewall, or set a private `cluster.head_address`"
        return [head.finding("head", CheckVerdict.WARNING, what, help)]
    return [head.ok("head", f"{address} is a private address")]


def token(path: Path | None) -> list[Finding]:
    """Check that the recorded cluster's token is readable by its owner only; no finding without a token."""
    if path is None:
        return []
    try:
        mode = path.stat().st_mode
    except OSError:
        return []
    if mode & 0o077:
        what, help = f"`{path}` is readable by others", f"run `chmod 600 {path}`, and restart the cluster"
        return [Finding("token", CheckVerdict.FAULT, what, None, "this machine", help)]
    return [Finding("token", CheckVerdict.OK, "readable by its owner only", None, "this machine")]


def authentication(*, up: bool, authenticated: bool) -> list[Finding]:
    """Check that the running cluster requires a token.

    Args:
        up: whether one is recorded here.
        authenticated: whether it requires a token.
    """
    if not up or authenticated:
        return []
    what = "the running cluster has no authentication: anyone who reaches its ports can run programs on its nodes"
    help = "restart it without `--insecure-no-auth`"
    return [Finding("auth", CheckVerdict.WARNING, what, help=help)]
