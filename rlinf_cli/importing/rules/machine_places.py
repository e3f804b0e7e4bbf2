"""`cluster`: machines and component placement from a file of another project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from rlinf_cli.importing.outcomes import Added, Leaf
from rlinf_cli.importing.rules.rules_verl import engine, kl_in_loss, kl_in_reward, needs_values
from rlinf_cli.importing.rules.rules_verl_algorithm import distills
from rlinf_cli.importing.rules.shared_rules import Result, Table, Values, same
from rlinf_core.config.tree import MappingNode, name_pieces

_SHARED: Final = "as in verl, all components share the GPUs"
_PLACES: Final = ("cluster", "component_placement")
# Components of the original that are not separate groups here.
_WITHIN: Final = {
    "inference": "the actor computes log probabilities itself",
}
# Components that act, in a file without an environment: it only learns from demonstrations.
_ACTING: Final = dict.fromkeys(("env", "rollout"), "the file names no environment that a policy could be evaluated in")
# CPU processes that score answers.
_REWARD_PROCESSES: Final = 4


def verl_rules() -> Table:
    """Return the rules of verl's keys about machines."""

    def nodes(leaf: Leaf, values: Values) -> Result:
        return same("cluster.num_nodes", leaf)

    def accelerators(leaf: Leaf, values: Values) -> Result:
        return same("cluster.node_groups[0].accelerators.per_node", leaf)

    return {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": accelerators}


def verl_places(values: Values) -> Iterator[Added]:
    """Yield the placement for a verl file, where all components take turns on all GPUs."""
    nodes, per_node = values.count("trainer.nnodes", 1), values.count("trainer.n_gpus_per_node", 8)
    gpus = nodes * per_node
    if values.get("trainer.nnodes") is None:
        yield Added(("cluster", "num_nodes"), nodes, "verl's default")
    yield Added(("cluster", "node_groups", 0, "label"), "gpus", "the file's machines")
    yield Added(
        ("cluster", "node_groups", 0, "node_ranks"), f"0-{nodes - 1}" if nodes > 1 else 0, "the file's machines"
    )
    if values.get("trainer.n_gpus_per_node") is None:
        yield Added(("cluster", "node_groups", 0, "accelerators", "per_node"), per_node, "verl's default")
    last = f"0-{gpus - 1}" if gpus > 1 else "0"
    shared = ["actor", *(["critic"] if needs_values(values) else [])]
    if (kl_in_loss(values) or kl_in_reward(values)) and not values.get("actor_rollout_ref.model.lora_rank", 0):
        shared.append("reference")
    if distills(values):
        shared.append("teacher")
    for name in shared:
        why = "in verl teachers have their own GPUs; here they share all" if name == "teacher" else _SHARED
        yield Added((*_PLACES, name, "node_group"), "gpus", why)
        yield Added((*_PLACES, name, "placement"), last, why)
    tensor = values.count("actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    engines = gpus // tensor if engine(values) in ("vllm", "sglang") and tensor > 1 and gpus % tensor == 0 else gpus
    place = last if engines == gpus else f"{last}:0-{engines - 1}" if engines > 1 else f"{last}:0"
    yield Added((*_PLACES, "rollout", "node_group"), "gpus", _SHARED)
    yield Added((*_PLACES, "rollout", "placement"), place, "one process per engine")
    yield from reward_place()


def reward_place() -> Iterator[Added]:
    """Yield the placement of the processes that score answers."""
    why = f"answers are scored by a separate group of {_REWARD_PROCESSES} CPU processes"
    yield Added((*_PLACES, "reward", "node_group"), "node", why)
    yield Added((*_PLACES, "reward", "placement"), f"0:0-{_REWARD_PROCESSES - 1}", why)


class Rest(NamedTuple):
    """The rest of a key of `component_placement`: its new name, empty where nothing remains, and the reason."""

    name: str
    why: str


def without_inner(placement: MappingNode, *, acts: bool) -> Mapping[str, Rest]:
    """Return the keys of `component_placement` that change. `acts`: whether the file names an environment to act in."""
    reasons = _WITHIN if acts else {**_WITHIN, **_ACTING}
    changed: dict[str, Rest] = {}
    for entry in placement.entries:
        pieces = [piece.name for piece in name_pieces(entry.key.raw)]
        kept = [name for name in pieces if name not in reasons]
        if kept != pieces:
            why = "; ".join(dict.fromkeys(reasons[name] for name in pieces if name in reasons))
            changed[entry.key.raw] = Rest(",".join(kept), why)
    return changed
