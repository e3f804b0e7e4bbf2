"""Checks of resources on each node: disk, shared memory, memory, descriptors, ports, clock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from rlinf_cli.cluster.checks.finding import GIB, MIB, CheckVerdict, Finding, ProbedNode, size

# Below the first, Ray fails with obscure errors; below the second, logs and checkpoints soon do.
_LEAST_DISK: Final = 256 * MIB
_GOOD_DISK: Final = 5 * GIB
# Ray's object store and rlinf's arenas are there; containers have 64 MiB by default.
_LEAST_SHM: Final = 100 * MIB
_GOOD_SHM: Final = 1 * GIB
# Firmware and kernel reserve a few percent of the memory.
_SEEN_MEMORY: Final = 0.9
# Every connection, file and pipe of a worker takes one.
_LEAST_FILES: Final = 1024
_GOOD_FILES: Final = 4096
_GOOD_SKEW_SECONDS: Final = 2.0
_MOST_SKEW_SECONDS: Final = 30.0


def disks(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check the free space in each node's folder for temporary files."""
    return [
        _room(machine, "disk", machine.facts["disk_free"], _LEAST_DISK, _GOOD_DISK, f"for `{machine.facts['folder']}`")
        for machine in probed
    ]


def shared_memory(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check the free space in each node's /dev/shm."""
    return [
        _room(machine, "shm", machine.facts["shm_free"], _LEAST_SHM, _GOOD_SHM, "in /dev/shm") for machine in probed
    ]


def memory(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that nodes have the memory that the file declares."""
    return [finding for machine in probed if (finding := _memory(machine)) is not None]


def _memory(machine: ProbedNode) -> Finding | None:
    declared = machine.node.memory_gib
    if declared is None:
        return None
    memory: int = machine.facts["memory"]
    data = {"declared_gib": declared, "found_bytes": memory}
    if memory < _SEEN_MEMORY * declared * GIB:
        what = f"{size(memory)} of memory, {declared:g} GiB declared"
        help = "correct `memory_gib` of its group, or check for an undetected memory module"
        return machine.finding("memory", CheckVerdict.FAULT, what, help, data)
    return machine.ok("memory", f"{declared:g} GiB, as declared", data)


def _room(machine: ProbedNode, check: str, free: int, least: int, good: int, where: str) -> Finding:
    help = "free some space" if check == "disk" else "free some space, or start the container with a larger one"
    data = {"free_bytes": free}
    if free < least:
        what = f"{size(free)} free {where}, Ray needs {size(least)}"
        return machine.finding(check, CheckVerdict.FAULT, what, help, data)
    if free < good:
        what = f"{size(free)} free {where}, a job soon needs {size(good)}"
        return machine.finding(check, CheckVerdict.WARNING, what, help, data)
    # The exact figure would prevent merging the lines of similar nodes.
    return machine.ok(check, f"{size(good)} or more free {where}", data)


def limits(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check how many descriptors a process may open."""
    return [_files(machine) for machine in probed]


def _files(machine: ProbedNode) -> Finding:
    soft, hard = machine.facts["files_soft"], machine.facts["files_hard"]
    # Ray raises its own soft limit to the hard limit.
    may = hard if hard > 0 else soft
    what = f"a process may open {may} files"
    help = "raise `nofile` for this user, in /etc/security/limits.conf or the service that starts sshd"
    data = {"soft": soft, "hard": hard}
    if may < _LEAST_FILES:
        return machine.finding("limits", CheckVerdict.FAULT, f"{what}, Ray needs {_LEAST_FILES}", help, data)
    if may < _GOOD_FILES:
        return machine.finding("limits", CheckVerdict.WARNING, f"{what}, {_GOOD_FILES} are recommended", help, data)
    return machine.ok("limits", f"a process may open {_GOOD_FILES} files or more", data)


def ports(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that Ray's ports are free, and that the range is not ephemeral."""
    return [_ports(machine) for machine in probed]


def _ports(machine: ProbedNode) -> Finding:
    wanted = machine.node.ports
    conflicts: list[list[Any]] = list(machine.facts["taken"])
    if conflicts:
        listed = "; ".join(
            f"port {port} ({str(name).replace('_', ' ')}): {process} listens" for name, port, process in conflicts
        )
        help = "set other ports in `cluster.ports`, or end that process"
        return machine.finding("ports", CheckVerdict.FAULT, listed, help, {"taken": conflicts})
    ephemeral = machine.facts["ephemeral"]
    if ephemeral and wanted.gcs <= ephemeral[1] and wanted.last_data >= ephemeral[0]:
        what = f"{wanted.full_range} overlap the ephemeral ports of the system, {ephemeral[0]}-{ephemeral[1]}"
        return machine.finding("ports", CheckVerdict.WARNING, what, "choose `cluster.ports` below these")
    return machine.ok("ports", f"{wanted.full_range}: those of Ray are free")


def clocks(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that every clock agrees with the majority.

    A reply's timestamp must lie between request and arrival. The distance outside of that interval is a lower bound of
    the skew; less cannot be distinguished from latency.
    """
    offsets = {machine.node.rank: _offset(machine) for machine in probed}
    usual = median(offsets.values()) if len(offsets) > 1 else 0.0
    findings = [_clock(machine, offsets[machine.node.rank] - usual) for machine in probed]
    if abs(usual) > _GOOD_SKEW_SECONDS:
        what = f"it is {_distance(-usual)} the nodes"
        help = "let a time service (NTP, chrony) set it"
        findings.append(
            Finding("clock", CheckVerdict.WARNING, what, None, "this machine", help, {"skew_seconds": -usual})
        )
    return findings


def _offset(machine: ProbedNode) -> float:
    node_time = float(machine.facts["time"])
    return min(0.0, node_time - machine.asked) + max(0.0, node_time - machine.heard)


def _clock(machine: ProbedNode, skew: float) -> Finding:
    data = {"skew_seconds": round(skew, 3)}
    help = "let a time service (NTP, chrony) set its clock"
    if abs(skew) > _GOOD_SKEW_SECONDS:
        verdict = CheckVerdict.FAULT if abs(skew) > _MOST_SKEW_SECONDS else CheckVerdict.WARNING
        return machine.finding("clock", verdict, f"it is {_distance(skew)} the others", help, data)
    return machine.ok("clock", f"within {_GOOD_SKEW_SECONDS:g} s of the others", data)


def _distance(skew: float) -> str:
    """Return `3600 s ahead of`."""
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"
