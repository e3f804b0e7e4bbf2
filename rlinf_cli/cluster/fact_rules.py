"""Checks of each node's software, space and clock: rules that derive a result from the facts of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.cluster.checks import FAULT, GIB, MIB, OK, WARNING, Finding, ProbedNode, Said, size
from rlinf_core.errors import ConfigError
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.node.environment import forwarded_values

_OLDEST: Final = (3, 11)
# Below the first, Ray fails with obscure errors; below the second, logs and checkpoints soon fail.
_DISK: Final = (256 * MIB, 5 * GIB)
# /dev/shm holds Ray's object store and rlinf's arenas; containers have 64 MiB by default.
_SHM: Final = (100 * MIB, 1 * GIB)
# Every connection, file and pipe of a worker takes a descriptor.
_FILES: Final = (1024, 4096)
# The visible fraction of the memory: firmware and kernel reserve a few percent.
_SEEN_MEMORY: Final = 0.9
_SKEW_SECONDS: Final = (2.0, 30.0)
# A warning lists at most this many packages.
_LISTED: Final = 6


class SoftwareReference(NamedTuple):
    """The software that the nodes are compared with.

    Attributes:
        head: node 0, or if it did not answer, a node with the most common software.
        here: the software of this machine; see `questions.software`.
        driver, driver_place: the software of the driver, and its place: here if this machine is a node, else the head.
        recipe: the name of the recipe; None without one.
        own_recipe: the result of `node_probe.recipe_of` here.
    """

    head: ProbedNode
    here: Mapping[str, Any]
    driver: Mapping[str, Any]
    driver_place: str
    recipe: str | None
    own_recipe: Mapping[str, Any] | None


def reference_of(
    probed: Sequence[ProbedNode],
    here: Mapping[str, Any],
    machine: str,
    recipe: str | None,
    own_recipe: Mapping[str, Any] | None,
) -> SoftwareReference:
    """Return the software with which the nodes are compared; `machine` is the id of this machine."""
    head = _head(probed)
    if any(node.facts["machine"] == machine for node in probed):
        return SoftwareReference(head, here, here, "here", recipe, own_recipe)
    return SoftwareReference(head, here, head.facts, f"on {head.node.name}", recipe, own_recipe)


Rule: TypeAlias = Callable[[ProbedNode, SoftwareReference], Said | None]


def interpreter(machine: ProbedNode, reference: SoftwareReference) -> Said:
    """Check that a node's Python is new enough and has the head's minor version."""
    path, python = machine.node.interpreter, machine.facts["python"]
    what = f"`{path}` is Python {_version(python)}"
    help = "set another `python_interpreter_path` for its group"
    fault = machine.facts.get("fault")
    if fault:
        return Said(FAULT, f"`{path}` cannot report its versions: {fault}", help)
    if tuple(python[:2]) < _OLDEST:
        return Said(FAULT, f"{what}, rlinf needs 3.11 or newer", help)
    of_head = reference.head.facts["python"]
    if python[:2] != of_head[:2]:
        help = "set an interpreter of the same minor version for its group"
        return Said(FAULT, f"{what}, {reference.head.node.name} runs {_version(of_head)}", help)
    return Said(OK, what)


def ray(machine: ProbedNode, reference: SoftwareReference) -> Said:
    """Check that a node has the head's version of Ray."""
    path, version, wanted = machine.node.interpreter, machine.facts["ray"], reference.head.facts["ray"]
    install = f"run `{path} -m pip install ray{f'=={wanted}' if wanted else ''}`"
    if version is None:
        return Said(FAULT, f"`{path}` has no ray", install)
    if wanted is not None and version != wanted:
        return Said(FAULT, f"`{path}` has ray {version}, {reference.head.node.name} has {wanted}", install)
    return Said(OK, f"ray {version}")


def code(machine: ProbedNode, reference: SoftwareReference) -> Said:
    """Check that the rlinf and the recipes that a node would import equal those on this machine."""
    path, fingerprint = machine.node.interpreter, machine.facts["fingerprint"]
    places: dict[str, Any] = dict(machine.facts.get("places") or {})
    if fingerprint is None:
        return Said(FAULT, f"`{path}` has no rlinf", "install the same rlinf there")
    if "recipes" not in places:
        return Said(WARNING, f"`{path}` has rlinf without recipes", "install the same rlinf there")
    own = reference.here["fingerprint"]
    if fingerprint != own:
        where = ", ".join(f"`{place}`" for place in places.values())
        what = f"the code in {where} has fingerprint {fingerprint}, on this machine {own}"
        return Said(FAULT, what, "install the same rlinf there; another package named `recipes` may shadow it")
    return Said(OK, f"rlinf {machine.facts['rlinf']}, fingerprint {fingerprint}")


def driver(machine: ProbedNode, reference: SoftwareReference) -> Said:
    """Warn if an interpreter's version of Python, or of a package that rlinf uses, differs from the driver's."""
    own, theirs = reference.driver, machine.facts
    installed: dict[str, str] = theirs.get("packages") or {}
    wanted: dict[str, str] = own.get("packages") or {}
    differing = [
        f"{name} {installed[name]} ({version})"
        for name, version in wanted.items()
        if name in installed and installed[name] != version
    ]
    if theirs["python"] != own["python"]:
        differing.insert(0, f"Python {_version(theirs['python'])} ({_version(own['python'])})")
    if not differing:
        return Said(OK, "the same versions of Python and packages as the driver's")
    omitted = f" and {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
    what = f"`{machine.node.interpreter}` and the driver {reference.driver_place} (in brackets) differ: "
    help = "install the same versions, as far as the processes of that node can have them"
    return Said(WARNING, f"{what}{', '.join(differing[:_LISTED])}{omitted}", help, {"differing": differing})


def recipe(machine: ProbedNode, reference: SoftwareReference) -> Said | None:
    """Check that a node has the same custom recipe as this machine; `code` covers rlinf's own recipes."""
    name, own = reference.recipe, (reference.own_recipe or {}).get("found")
    if name is None or own is None or str(own["value"]).startswith("recipes."):
        return None
    reply: Mapping[str, Any] = machine.facts.get("recipe") or {"fault": "it was not asked"}
    path, help = machine.node.interpreter, "install the same package there"
    if "found" not in reply:
        return Said(FAULT, f"`{path}` cannot load recipe `{name}`: {reply['fault']}", help)
    entry = reply["found"]
    if entry["value"] is None:
        return Said(FAULT, f"`{path}` has no recipe `{name}`", help)
    what = f"`{name}` is `{entry['value']}`"
    if entry != own:
        return Said(FAULT, f"recipe {what} {entry['digest']}, here `{own['value']}` {own['digest']}", help)
    return Said(OK, f"{what}, fingerprint {entry['digest']}")


def ports(machine: ProbedNode, _: SoftwareReference) -> Said:
    """Check that Ray's ports are free on a node, and do not overlap the ephemeral ports."""
    wanted, taken, ephemeral = machine.node.ports, list(machine.facts["taken"]), machine.facts["ephemeral"]
    if taken:
        listed = "; ".join(
            f"port {port} ({str(name).replace('_', ' ')}): {process} listens" for name, port, process in taken
        )
        return Said(FAULT, listed, "set other ports in `cluster.ports`, or end that process", {"taken": taken})
    if ephemeral and wanted.gcs <= ephemeral[1] and wanted.last_data >= ephemeral[0]:
        what = f"{wanted.full_range} overlap the ephemeral ports of the system, {ephemeral[0]}-{ephemeral[1]}"
        return Said(WARNING, what, "choose `cluster.ports` below these")
    return Said(OK, f"{wanted.full_range}: those of Ray are free")


def disk(machine: ProbedNode, _: SoftwareReference) -> Said:
    """Check the free space in a node's folder for temporary files."""
    facts = machine.facts
    return _room(facts["disk_free"], _DISK, f"for `{facts['folder']}`", "free some space")


def shm(machine: ProbedNode, _: SoftwareReference) -> Said:
    """Check the free space in a node's /dev/shm."""
    help = "free some space, or start the container with a larger one"
    return _room(machine.facts["shm_free"], _SHM, "in /dev/shm", help)


def _room(free: int, limits: tuple[int, int], where: str, help: str) -> Said:
    (least, good), data = limits, {"free_bytes": free}
    if free < least:
        return Said(FAULT, f"{size(free)} free {where}, Ray needs {size(least)}", help, data)
    if free < good:
        return Said(WARNING, f"{size(free)} free {where}, a job soon needs {size(good)}", help, data)
    # Similar nodes must have equal texts to be merged into one line, so the exact figure is omitted.
    return Said(OK, f"{size(good)} or more free {where}", "", data)


def memory(machine: ProbedNode, _: SoftwareReference) -> Said | None:
    """Check that a node has the memory that the file declares."""
    declared = machine.node.memory_gib
    if declared is None:
        return None
    actual: int = machine.facts["memory"]
    data = {"declared_gib": declared, "found_bytes": actual}
    if actual < _SEEN_MEMORY * declared * GIB:
        help = "correct `memory_gib` of its group, or check for an undetected memory module"
        return Said(FAULT, f"{size(actual)} of memory, {declared:g} GiB declared", help, data)
    return Said(OK, f"{declared:g} GiB, as declared", "", data)


def limits(machine: ProbedNode, _: SoftwareReference) -> Said:
    """Check how many descriptors a process may open."""
    (least, good), soft, hard = _FILES, machine.facts["files_soft"], machine.facts["files_hard"]
    # Ray raises its own soft limit to the hard limit.
    may = hard if hard > 0 else soft
    what, data = f"a process may open {may} files", {"soft": soft, "hard": hard}
    help = "raise `nofile` for this user, in /etc/security/limits.conf or the service that starts sshd"
    if may < least:
        return Said(FAULT, f"{what}, Ray needs {least}", help, data)
    if may < good:
        return Said(WARNING, f"{what}, {good} are recommended", help, data)
    return Said(OK, f"a process may open {good} files or more", "", data)


_SOFTWARE: Final[tuple[Rule, ...]] = (ray, code, recipe, driver)
_MACHINE: Final[tuple[Rule, ...]] = (ports, disk, shm, memory, limits)


def of_software(probed: Sequence[ProbedNode], reference: SoftwareReference) -> Iterator[Finding]:
    """Yield the findings about every interpreter of the nodes: Ray's, and those of the groups."""
    everywhere = _with_groups(probed)
    yield from _applied(interpreter, everywhere, reference)
    # A group's interpreter that does not run is reported once, not for each missing package.
    answering = [*probed, *(machine for machine in everywhere[len(probed) :] if not machine.facts.get("fault"))]
    for rule in _SOFTWARE:
        yield from _applied(rule, answering, reference)


def of_machines(probed: Sequence[ProbedNode], reference: SoftwareReference) -> Iterator[Finding]:
    """Yield the findings about the clocks, ports, disk space, memory and limits of the nodes."""
    yield from clocks(probed)
    for rule in _MACHINE:
        yield from _applied(rule, probed, reference)


def _applied(rule: Rule, probed: Sequence[ProbedNode], reference: SoftwareReference) -> Iterator[Finding]:
    for machine in probed:
        said = rule(machine, reference)
        if said is not None:
            yield machine.finding(rule.__name__, said)


def _with_groups(probed: Sequence[ProbedNode]) -> list[ProbedNode]:
    """Return the nodes, and a copy for each interpreter of a node group, with that interpreter's facts."""
    return [
        *probed,
        *(
            machine._replace(node=replace(machine.node, interpreter=own.interpreter), facts={**machine.facts, **reply})
            for machine in probed
            for own, reply in zip(machine.node.environments, machine.facts.get("environments", ()), strict=False)
        ),
    ]


def clocks(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that every clock agrees with the majority.

    A reply's timestamp must lie between request and arrival. The distance from that interval is a lower bound of the
    skew; a smaller skew cannot be distinguished from latency.
    """
    good, most = _SKEW_SECONDS
    offsets = [_offset(machine) for machine in probed]
    usual = median(offsets) if len(offsets) > 1 else 0.0
    others = "the others" if len(probed) > 1 else "this machine's"
    findings: list[Finding] = []
    for machine, offset in zip(probed, offsets, strict=True):
        skew = offset - usual
        data = {"skew_seconds": round(skew, 3)}
        if abs(skew) <= good:
            findings.append(machine.finding("clock", Said(OK, f"within {good:g} s of {others}", "", data)))
            continue
        help = "let a time service (NTP, chrony) set its clock"
        verdict = FAULT if abs(skew) > most else WARNING
        findings.append(machine.finding("clock", Said(verdict, f"it is {_distance(skew)} {others}", help, data)))
    if abs(usual) > good:
        what, help = f"it is {_distance(-usual)} the nodes", "let a time service (NTP, chrony) set it"
        data = {"skew_seconds": -usual}
        findings.append(Finding("clock", WARNING, what, None, "this machine", help, data))
    return findings


def machines(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that no two nodes are the same machine."""
    first: dict[str, ProbedNode] = {}
    help = "list a separate machine for every node in `hosts`"
    return [
        machine.finding("machine", Said(FAULT, f"it is the same machine as {twin.node.name}", help))
        for machine in probed
        for twin in (first.setdefault(str(machine.facts["machine"]), machine),)
        if twin is not machine
    ]


def head_address(head: ProbedNode, address: str) -> list[Finding]:
    """Check that the head's address is not public, since Ray's ports are open on every interface of a node."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return []  # a name: the nodes resolve it
    # Documentation and carrier-grade NAT ranges are not private either, and get the same finding.
    if parsed.is_global:
        what = f"the head's address {address} is reachable from the internet"
        help = "restrict `cluster.ports` to the nodes with a firewall, or set a private `cluster.head_address`"
        return [head.finding("head", Said(WARNING, what, help))]
    return [head.finding("head", Said(OK, f"{address} is a private address"))]


def of_cluster(recorded: ClusterRecord | None, forwarded: tuple[str, ...], environ: Mapping[str, str]) -> list[Finding]:
    """Check the token and the authentication of the running cluster, and that forwarded variables are set here."""
    findings: list[Finding] = []
    if recorded is not None:
        mode = _mode(recorded.token_path)
        if mode is not None and mode & 0o077:
            what, help = (
                f"`{recorded.token_path}` is readable by others",
                f"run `chmod 600 {recorded.token_path}`, and restart the cluster",
            )
            findings.append(Finding("token", FAULT, what, None, "this machine", help))
        elif mode is not None:
            findings.append(Finding("token", OK, "readable by its owner only", None, "this machine"))
        if not recorded.authenticated:
            what = (
                "the running cluster has no authentication: anyone who reaches its ports can run programs on its nodes"
            )
            findings.append(Finding("auth", WARNING, what, help="restart it without `--insecure-no-auth`"))
    if forwarded:
        said = Said(OK, "the variables of `cluster.forward_env` are set")
        try:
            forwarded_values(forwarded, environ)
        except ConfigError as error:
            said = Said(FAULT, error.message, error.help or "")
        findings.append(Finding("environment", said.verdict, said.what, None, "this machine", said.help))
    return findings


def _mode(path: Path | None) -> int | None:
    try:
        return None if path is None else path.stat().st_mode
    except OSError:
        return None


def _offset(machine: ProbedNode) -> float:
    node_time = float(machine.facts["time"])
    return min(0.0, node_time - machine.asked) + max(0.0, node_time - machine.heard)


def _distance(skew: float) -> str:
    """Return a skew in words, as in `3600 s ahead of`."""
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"


def _version(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def _head(probed: Sequence[ProbedNode]) -> ProbedNode:
    """Return the node to compare with: node 0, or if it did not answer, one with the most common software."""
    for machine in probed:
        if machine.node.is_head:
            return machine
    software = [(tuple(machine.facts["python"][:2]), machine.facts["ray"]) for machine in probed]
    return probed[software.index(Counter(software).most_common(1)[0][0])]
