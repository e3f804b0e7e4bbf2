"""Checks of who could reach the cluster, and that each node is a machine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from rlinf_cli.bootstrap.checks.finding import CheckVerdict, Finding, Seen


def machines(seen: Sequence[Seen]) -> list[Finding]:
    """No two nodes are the same machine."""
    first: dict[str, Seen] = {}
    found: list[Finding] = []
    for each in seen:
        twin = first.setdefault(str(each.facts["machine"]), each)
        if twin is not each:
            what = f"it is the same machine as {twin.node.name}"
            help = "give every node a machine of its own in `hosts`"
            found.append(each.finding("machine", CheckVerdict.FAULT, what, help))
    return found


def head_address(seen: Sequence[Seen], address: str | None) -> list[Finding]:
    """Return whether strangers can reach the head: Ray's ports are open at every address of a node.

    Args:
        seen: the nodes.
        address: where the head will listen; None while nobody knows.
    """
    head = next((each for each in seen if each.node.is_head), None)
    if head is None or address is None:
        return []
    try:
        known = ip_address(address)
    except ValueError:
        return []  # a name: what it stands for is up to the nodes
    # An address of a documentation or carrier's range is not private either, and is told alike.
    if known.is_global:
        what = f"the head's address {address} is reached from the internet"
        help = "let a firewall keep `cluster.ports` to the nodes, or give a private `cluster.head_address`"
        return [head.finding("head", CheckVerdict.WARNING, what, help)]
    return [head.ok("head", f"{address} is a private address")]


def token(path: Path | None) -> list[Finding]:
    """Return whether the recorded cluster's token is readable by its owner only; nothing where there is none."""
    if path is None:
        return []
    try:
        mode = path.stat().st_mode
    except OSError:
        return []
    if mode & 0o077:
        what, help = f"`{path}` is readable by others", f"`chmod 600 {path}`, and bring the cluster up anew"
        return [Finding("token", CheckVerdict.FAULT, what, None, "this machine", help)]
    return [Finding("token", CheckVerdict.OK, "readable by its owner only", None, "this machine")]


def authentication(*, up: bool, authenticated: bool) -> list[Finding]:
    """Return whether the cluster that is up asks for a token.

    Args:
        up: whether one is recorded here.
        authenticated: whether it asks for a token.
    """
    if not up or authenticated:
        return []
    what = "the cluster that is up asks nobody for a token: whoever reaches its ports can run programs on its nodes"
    help = "bring it up anew without `--insecure-no-auth`"
    return [Finding("auth", CheckVerdict.WARNING, what, help=help)]
