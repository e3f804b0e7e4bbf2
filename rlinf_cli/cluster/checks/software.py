"""Checks of interpreters, Ray, and rlinf itself: installed, and equal everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode
from rlinf_core.errors import ConfigError
from rlinf_core.placement.environment import forwarded_values

_OLDEST: Final = (3, 11)


def interpreters(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that each node's Python is new enough, and of the head's minor version."""
    head = _head(probed)
    return [_interpreter(machine, head) for machine in probed]


def of_groups(probed: Sequence[ProbedNode]) -> list[ProbedNode]:
    """Return the nodes again for each interpreter of a node group, with that interpreter's facts."""
    return [
        machine._replace(
            node=replace(machine.node, interpreter=environment.interpreter), facts={**machine.facts, **reply}
        )
        for machine in probed
        for environment, reply in zip(machine.node.environments, machine.facts.get("environments", ()), strict=False)
    ]


def forwarded(names: tuple[str, ...], environ: Mapping[str, str]) -> list[Finding]:
    """Check that the variables of `cluster.forward_env` are set on this machine."""
    if not names:
        return []
    try:
        forwarded_values(names, environ)
    except ConfigError as error:
        return [Finding("environment", CheckVerdict.FAULT, error.message, None, "this machine", error.help or "")]
    return [
        Finding("environment", CheckVerdict.OK, "the variables of `cluster.forward_env` are set", None, "this machine")
    ]


def _interpreter(machine: ProbedNode, head: ProbedNode) -> Finding:
    path, python = machine.node.interpreter, machine.facts["python"]
    version = ".".join(map(str, python))
    what = f"`{path}` is Python {version}"
    help = "set another `python_interpreter_path` for its group"
    fault = machine.facts.get("fault")
    if fault:
        return machine.finding("interpreter", CheckVerdict.FAULT, f"`{path}` cannot report its versions: {fault}", help)
    if tuple(python[:2]) < _OLDEST:
        return machine.finding("interpreter", CheckVerdict.FAULT, f"{what}, rlinf needs 3.11 or newer", help)
    if python[:2] != head.facts["python"][:2]:
        of_head = ".".join(map(str, head.facts["python"]))
        return machine.finding(
            "interpreter",
            CheckVerdict.FAULT,
            f"{what}, {head.node.name} runs {of_head}",
            "set an interpreter of the same minor version for its group",
        )
    return machine.ok("interpreter", what)


def rays(probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that each node has Ray, in the head's version."""
    head = _head(probed)
    return [_ray(machine, head) for machine in probed]


def _ray(machine: ProbedNode, head: ProbedNode) -> Finding:
    path, version, wanted = machine.node.interpreter, machine.facts["ray"], head.facts["ray"]
    if version is None:
        package = f"ray=={wanted}" if wanted else "ray"
        return machine.finding(
            "ray", CheckVerdict.FAULT, f"`{path}` has no ray", f"run `{path} -m pip install {package}`"
        )
    if wanted is not None and version != wanted:
        return machine.finding(
            "ray",
            CheckVerdict.FAULT,
            f"`{path}` has ray {version}, {head.node.name} has {wanted}",
            f"run `{path} -m pip install ray=={wanted}`",
        )
    return machine.ok("ray", f"ray {version}")


def codes(probed: Sequence[ProbedNode], own: str | None) -> list[Finding]:
    """Check that the rlinf and the recipes that each node would import equal those on this machine.

    Args:
        probed: the nodes.
        own: the fingerprint of the code on this machine.
    """
    return [_code(machine, own) for machine in probed]


def _code(machine: ProbedNode, own: str | None) -> Finding:
    path, fingerprint = machine.node.interpreter, machine.facts["fingerprint"]
    places: dict[str, Any] = dict(machine.facts.get("places") or {})
    if fingerprint is None:
        return machine.finding("code", CheckVerdict.FAULT, f"`{path}` has no rlinf", "install the same rlinf there")
    if "recipes" not in places:
        return machine.finding(
            "code", CheckVerdict.WARNING, f"`{path}` has rlinf without recipes", "install the same rlinf there"
        )
    if fingerprint != own:
        where = ", ".join(f"`{place}`" for place in places.values())
        return machine.finding(
            "code",
            CheckVerdict.FAULT,
            f"the code in {where} has fingerprint {fingerprint}, on this machine {own}",
            "install the same rlinf there; another package named `recipes` may shadow it",
        )
    return machine.ok("code", f"rlinf {machine.facts['rlinf']}, fingerprint {fingerprint}")


def recipes(probed: Sequence[ProbedNode], name: str | None, own: Mapping[str, Any] | None) -> list[Finding]:
    """Check that each node has the same recipe as this machine, if it is not one of rlinf's.

    Args:
        probed: the nodes.
        name: the name of the recipe; None without one.
        own: the result of `node_inspect.recipe_of` on this machine.
    """
    here = (own or {}).get("found")
    if name is None or here is None or str(here["value"]).startswith("recipes."):
        return []  # rlinf's own recipes are part of its code
    return [_recipe(machine, name, here) for machine in probed]


def _recipe(machine: ProbedNode, name: str, own: Mapping[str, Any]) -> Finding:
    reply: Mapping[str, Any] = machine.facts.get("recipe") or {"fault": "it was not asked"}
    path, help = machine.node.interpreter, "install the same package there"
    if "found" not in reply:
        return machine.finding(
            "recipe", CheckVerdict.FAULT, f"`{path}` cannot load recipe `{name}`: {reply['fault']}", help
        )
    entry_point = reply["found"]
    if entry_point["value"] is None:
        return machine.finding("recipe", CheckVerdict.FAULT, f"`{path}` has no recipe `{name}`", help)
    if entry_point != own:
        what = (
            f"recipe `{name}` is `{entry_point['value']}` {entry_point['digest']}, here `{own['value']}`"
            f" {own['digest']}"
        )
        return machine.finding("recipe", CheckVerdict.FAULT, what, help)
    return machine.ok("recipe", f"`{name}` is `{entry_point['value']}`, fingerprint {entry_point['digest']}")


def _head(probed: Sequence[ProbedNode]) -> ProbedNode:
    """Return the reference for comparisons: node 0, or if it did not answer, the majority of the others."""
    for machine in probed:
        if machine.node.is_head:
            return machine
    usual, _ = Counter((tuple(machine.facts["python"][:2]), machine.facts["ray"]) for machine in probed).most_common(1)[
        0
    ]
    return next(machine for machine in probed if (tuple(machine.facts["python"][:2]), machine.facts["ray"]) == usual)
