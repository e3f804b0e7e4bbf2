"""Checks of the nodes' hardware: accelerators, robots and cameras, found against declared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.topology import NodeInfo

_PACKAGE: Final = {"realsense": "pyrealsense2", "zed": "pyzed"}


def accelerators(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check the number of accelerators, and their model if the system reports one."""
    return [_accelerators(machine) for machine in probed]


def _accelerators(machine: ProbedNode) -> Finding:
    declared, reply = machine.node.accelerators, machine.facts["accelerators"]
    if "found" not in reply:
        verdict = (
            CheckVerdict.SKIPPED if declared is None or machine.facts["fingerprint"] is None else CheckVerdict.FAULT
        )
        what = (
            "not checked, because rlinf is not installed there"
            if machine.facts["fingerprint"] is None
            else reply["fault"]
        )
        return machine.finding("accelerators", verdict, what)
    models: list[str | None] = reply["found"]["models"]
    what, data = found_text(reply), {"found": len(models), "models": models}
    if declared is None:
        return machine.ok("accelerators", what, data)
    data["declared"] = declared.per_node
    if len(models) != declared.per_node:
        named = f" {declared.model}" if declared.model else ""
        count_text = f"{len(models)} of" if models else "no accelerator found,"
        message = f"{count_text} {declared.per_node} declared{named}" + (" were found" if models else "")
        help = "fix the node, or correct `accelerators.per_node` of its group; a visibility variable may hide some"
        return machine.finding("accelerators", CheckVerdict.FAULT, message, help, data)
    wanted = _folded(declared.model or "")
    other_models = sorted({model for model in models if model and wanted not in _folded(model)})
    if wanted and other_models:
        message = f"{declared.model} is declared, {', '.join(other_models)} was found"
        return machine.finding(
            "accelerators", CheckVerdict.FAULT, message, "correct `accelerators.model` of its group", data
        )
    return machine.ok("accelerators", f"{what}, as declared", data)


def _folded(model: str) -> str:
    """Fold case and separators, so that `RTX 4090` matches `NVIDIA GeForce RTX-4090`."""
    return "".join(filter(str.isalnum, model.casefold()))


def found_text(reply: Any) -> str:
    """Return `8 NVIDIA (A800)`, `none`, or why it is unknown."""
    if "found" not in reply:
        return f"unknown: {reply['fault']}"
    models = reply["found"]["models"]
    if not models:
        return "no accelerator found"
    names = ", ".join(sorted({model for model in models if model}))
    return f"{len(models)} {reply['found']['type']}" + (f" ({names})" if names else "")


def node_info(probed: ProbedNode) -> NodeInfo:
    """Return the `NodeInfo` of a node that answered, with its accelerators if known."""
    node = NodeInfo(probed.node.rank)
    reply = probed.facts["accelerators"].get("found")
    if reply is None:
        return node
    models: list[str | None] = reply["models"]
    if not models:
        return node._replace(num_accelerators=0)
    return node._replace(num_accelerators=len(models), accelerator_type=reply["type"], accelerator_model=models[0])


def robots(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that each declared robot answers on its node."""
    findings: list[Finding] = []
    for machine in probed:
        answers = {(host, port): fault for host, port, fault in machine.facts["robots"]}
        for kind, unit in machine.node.robots:
            if getattr(unit, "disable_validate", False):
                findings.append(machine.finding("robot", CheckVerdict.SKIPPED, f"{kind}: `disable_validate` is set"))
                continue
            for (host, port), node in zip(unit.addresses(), chain(unit.controller_nodes(), repeat(None)), strict=False):
                fault = answers.get((host, port), "not checked")
                findings.append(_robot(machine, kind, f"{host}:{port}", fault, node))
    return findings


def _robot(machine: ProbedNode, kind: str, address: str, fault: str | None, controller_node: int | None) -> Finding:
    """Return the finding about one controller; `controller_node` is the node that runs it, if the file names one."""
    data = {"type": kind, "address": address, "fault": fault, "controller_node_rank": controller_node}
    at_node = "" if controller_node is None else f" on node {controller_node}"
    robot = f"{kind} at {address}{f', controller{at_node},' if at_node else ''}"
    if fault is None:
        return machine.finding("robot", CheckVerdict.OK, f"{robot} answers", data=data)
    help = (
        f"switch on the robot and its controller{at_node}, and check the cable, `robot_ip` and the node's route to it"
    )
    return machine.finding("robot", CheckVerdict.FAULT, f"{robot.removesuffix(',')}: {fault}", help, data)


def cameras(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that each declared camera is plugged in, if the vendor's package is installed."""
    return [
        finding
        for machine in probed
        for make, serials in cameras_of(unit for _, unit in machine.node.robots).items()
        for finding in _cameras(machine, make, serials)
    ]


def _cameras(machine: ProbedNode, make: str, serials: Sequence[str]) -> list[Finding]:
    reply = machine.facts["cameras"].get(make) or {"fault": "not checked"}
    listed = ", ".join(serials)
    if "found" not in reply:
        package = _PACKAGE.get(make, make)
        if "ModuleNotFoundError" in reply["fault"]:
            what = f"{make} {listed}: `{package}` is not installed there, so it was not checked"
            return [machine.finding("camera", CheckVerdict.SKIPPED, what)]
        return [
            machine.finding("camera", CheckVerdict.FAULT, f"{make} {listed}: {reply['fault']}", f"repair `{package}`")
        ]
    present = {str(serial) for serial in reply["found"]}
    missing = [serial for serial in serials if serial not in present]
    if not missing:
        return [machine.ok("camera", f"{make} {listed} {'are' if len(serials) > 1 else 'is'} plugged in")]
    others = ", ".join(sorted(present - set(serials))) or "none"
    what = f"{make} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not plugged in; others there: {others}"
    return [machine.finding("camera", CheckVerdict.FAULT, what, "plug it in, or correct `camera_serials`")]


def cameras_of(units: Iterable[RobotUnit]) -> dict[str, tuple[str, ...]]:
    """Return the declared serials of a node's cameras by make."""
    serials_by_make: dict[str, tuple[str, ...]] = {}
    for unit in units:
        for make, serial in unit.cameras():
            serials_by_make[make] = (*serials_by_make.get(make, ()), serial)
    return serials_by_make


def judged(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Return all checks of devices."""
    return [*accelerators(probed), *robots(probed), *cameras(probed)]
