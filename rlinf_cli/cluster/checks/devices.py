"""Checks of the nodes' accelerators, robots and cameras against the declared ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final

from rlinf_cli.cluster.checks.finding import FAULT, OK, SKIPPED, Finding, ProbedNode, Said
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.topology import NodeInfo

_PACKAGE: Final = {"realsense": "pyrealsense2", "zed": "pyzed"}


def judged(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Return the findings about the accelerators, robots and cameras of the nodes."""
    return [
        *(machine.finding("accelerators", _accelerators(machine)) for machine in probed),
        *(machine.finding("robot", said) for machine in probed for said in _robots(machine)),
        *(machine.finding("camera", said) for machine in probed for said in _cameras(machine)),
    ]


def _accelerators(machine: ProbedNode) -> Said:
    """Check the number of accelerators, and their model if the system reports one."""
    declared, reply = machine.node.accelerators, machine.facts["accelerators"]
    if "found" not in reply:
        if machine.facts["fingerprint"] is None:
            return Said(SKIPPED, "not checked, because rlinf is not installed there")
        return Said(SKIPPED if declared is None else FAULT, reply["fault"])
    models: list[str | None] = reply["found"]["models"]
    what, data = found_text(reply), {"found": len(models), "models": models}
    if declared is None:
        return Said(OK, what, "", data)
    data["declared"] = declared.per_node
    if len(models) != declared.per_node:
        named = f" {declared.model}" if declared.model else ""
        count_text = f"{len(models)} of" if models else "no accelerator found,"
        message = f"{count_text} {declared.per_node} declared{named}" + (" were found" if models else "")
        help = "fix the node, or correct `accelerators.per_node` of its group; a visibility variable may hide some"
        return Said(FAULT, message, help, data)
    wanted = _folded(declared.model or "")
    others = sorted({model for model in models if model and wanted not in _folded(model)})
    if wanted and others:
        message = f"{declared.model} is declared, {', '.join(others)} was found"
        return Said(FAULT, message, "correct `accelerators.model` of its group", data)
    return Said(OK, f"{what}, as declared", "", data)


def _folded(model: str) -> str:
    """Return a model name without case and separators, so that `RTX 4090` matches `NVIDIA GeForce RTX-4090`."""
    return "".join(filter(str.isalnum, model.casefold()))


def found_text(reply: Any) -> str:
    """Return the accelerators in words, as in `8 NVIDIA (A800)`, or why they are unknown."""
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


def _robots(machine: ProbedNode) -> Iterator[Said]:
    """Check that each declared robot answers on its node."""
    answers = {(host, port): fault for host, port, fault in machine.facts["robots"]}
    for kind, unit in machine.node.robots:
        if getattr(unit, "disable_validate", False):
            yield Said(SKIPPED, f"{kind}: `disable_validate` is set")
            continue
        for address, node in zip(unit.addresses(), chain(unit.controller_nodes(), repeat(None)), strict=False):
            yield _robot(kind, "{}:{}".format(*address), answers.get(address, "not checked"), node)


def _robot(kind: str, address: str, fault: str | None, controller_node: int | None) -> Said:
    """Return the result for one controller; `controller_node` is the node that runs it, if the file names one."""
    data = {"type": kind, "address": address, "fault": fault, "controller_node_rank": controller_node}
    at_node = "" if controller_node is None else f" on node {controller_node}"
    robot = f"{kind} at {address}{f', controller{at_node},' if at_node else ''}"
    if fault is None:
        return Said(OK, f"{robot} answers", "", data)
    help = (
        f"switch on the robot and its controller{at_node}, and check the cable, `robot_ip` and the node's route to it"
    )
    return Said(FAULT, f"{robot.removesuffix(',')}: {fault}", help, data)


def _cameras(machine: ProbedNode) -> Iterator[Said]:
    """Check that each declared camera is plugged in, if the vendor's package is installed."""
    for make, serials in cameras_of(unit for _, unit in machine.node.robots).items():
        reply = machine.facts["cameras"].get(make) or {"fault": "not checked"}
        named, package = f"{make} {', '.join(serials)}", _PACKAGE.get(make, make)
        missing = [serial for serial in serials if serial not in {str(serial) for serial in reply.get("found", ())}]
        if "ModuleNotFoundError" in reply.get("fault", ""):
            yield Said(SKIPPED, f"{named}: `{package}` is not installed there, so it was not checked")
        elif "found" not in reply:
            yield Said(FAULT, f"{named}: {reply['fault']}", f"repair `{package}`")
        elif not missing:
            yield Said(OK, f"{named} {'are' if len(serials) > 1 else 'is'} plugged in")
        else:
            others = ", ".join(sorted({str(serial) for serial in reply["found"]} - set(serials))) or "none"
            are = "are" if len(missing) > 1 else "is"
            what = f"{make} {', '.join(missing)} {are} not plugged in; others there: {others}"
            yield Said(FAULT, what, "plug it in, or correct `camera_serials`")


def cameras_of(units: Iterable[RobotUnit]) -> dict[str, tuple[str, ...]]:
    """Return the declared serial numbers of a node's cameras, by make."""
    serials_by_make: dict[str, tuple[str, ...]] = {}
    for unit in units:
        for make, serial in unit.cameras():
            serials_by_make[make] = (*serials_by_make.get(make, ()), serial)
    return serials_by_make
