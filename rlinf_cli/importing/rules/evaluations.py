"""Evaluations of RLinf, which place `rollout` and `env` and have no `actor`: its model stands in `rollout.model`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from rlinf_cli.importing.outcomes import Added, ReferenceText
from rlinf_cli.importing.projects import placed
from rlinf_cli.importing.rules.rules_rlinf import EMBODIED
from rlinf_cli.importing.rules.shared_rules import Table, drop
from rlinf_core.config.tree import MappingNode, Node, Path, ScalarNode, find, format_path

_PLACES: Final[Path] = ("cluster", "component_placement")
# Sections of the original, with the rlinf section of their keys.
SECTIONS: Final[dict[Path, Path]] = {("rollout", "model"): ("actor", "model")}
# Keys of `env.eval` that say what the policy acts in.
_OF_BOTH: Final = ("env_type", "task", "options", "max_steps_per_rollout_epoch", "total_num_envs")
_NEVER: Final = drop("an evaluation trains nothing", quiet=True)
EVALUATION: Final[Table] = {
    **EMBODIED,
    **{key.replace("actor.", "rollout.", 1): rule for key, rule in EMBODIED.items() if key.startswith("actor.model.")},
    "actor.global_batch_size": _NEVER,
    "actor.micro_batch_size": _NEVER,
    "runner.max_epochs": _NEVER,
    "runner.max_steps": _NEVER,
    "runner.save_interval": _NEVER,
    "runner.val_check_interval": _NEVER,
}


def acts_alone(tree: MappingNode) -> bool:
    """Return whether a file of RLinf evaluates a policy: it places a `rollout`, and no section says what an `actor`
    trains.
    """
    placement = find(tree, _PLACES)
    components = placed(placement if isinstance(placement, MappingNode) else None)
    return "rollout" in components and find(tree, ("actor", "model")) is None


def evaluation_needs(tree: MappingNode, present: Collection[Path]) -> Iterator[Added]:
    """Yield what an evaluation needs here: the group that holds the weights, beside the one that acts."""
    placement = find(tree, _PLACES)
    assert isinstance(placement, MappingNode)
    place = placement.get(placed(placement)["rollout"])
    why = "the actor reads the weights and gives them to the rollout, beside it"
    if "actor" not in placed(placement):
        yield from (Added(at, value, why) for at, value in plain(place, (*_PLACES, "actor")) if place is not None)
    only = find(tree, ("runner", "only_eval"))
    if not isinstance(only, ScalarNode) or only.value is not True:
        yield Added(("runner", "only_eval"), True, "the file places nothing that trains")
    for path in sorted(present, key=format_path):
        if path[:2] == ("env", "eval") and path[2] in _OF_BOTH:
            yield Added(
                ("env", "train", *path[2:]), ReferenceText(f"${{{format_path(path)}}}"), "the policy is built for it"
            )


def plain(node: Node | None, at: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the scalars below a node, each with its path in the new file."""
    if isinstance(node, ScalarNode):
        yield at, node.raw
    elif isinstance(node, MappingNode):
        for entry in node.entries:
            yield from plain(entry.value, (*at, entry.key.raw))
