"""The rows of `foreign.toml` as rules for keys of other projects, and the values that a new file needs besides."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import isfunction
from typing import Any, Final, NamedTuple, cast

from rlinf_cli.importing import project_rules, shared_rules
from rlinf_cli.importing.foreign_names import foreign_table
from rlinf_cli.importing.project_rules import distills, engine, kl_in_loss, kl_in_reward, needs_values
from rlinf_cli.importing.projects import Project, agent_tools, placed
from rlinf_cli.importing.shared_rules import Added, Leaf, LeftOut, ReferenceText, Result, Rule, Table, Values
from rlinf_core.config.tree import MappingNode, Node, Path, ScalarNode, find, format_path, name_pieces

# The functions that the rows name: rules, which also take the other fields of a row, and conditions on all values.
FUNCTIONS: Final[Mapping[str, Any]] = {
    name: function
    for module in (shared_rules, project_rules)
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__
}
_ALTERNATIVES: Final = re.compile(r"\{([^{}]*)\}")
_FIELD: Final = re.compile(r"\{([\w.|]*)\}")
_TESTS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "known": lambda value: value is not None,
    "text": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and value > 0,
    "unset": lambda value: value is None or (isinstance(value, int) and value < 0),
}


def rules_of(*kinds: str) -> Table:
    """Return the rules for files of some kinds; later kinds take precedence."""
    table = foreign_table()["rules"]
    return {key: rule for kind in kinds for key, rule in as_rules(table[kind]).items()}


def as_rules(rows: Mapping[str, str | dict[str, Any] | list[dict[str, Any]]]) -> Table:
    """Return rows as rules by key; see the table."""
    rules: dict[str, Rule] = {}
    for keys, row in rows.items():
        cases = [{"to": row}] if isinstance(row, str) else row if isinstance(row, list) else [row]
        rules |= dict.fromkeys(_expanded(keys), partial(_decided, cases=cases))
    return rules


def _expanded(keys: str) -> Iterator[str]:
    match = _ALTERNATIVES.search(keys)
    for name in match[1].split(",") if match else [""]:
        yield f"{keys[: match.start()]}{name}{keys[match.end() :]}" if match else keys


def _decided(leaf: Leaf, values: Values, cases: Sequence[Mapping[str, Any]]) -> Result:
    """Return the result for a key of the first case whose conditions hold."""
    case = next(case for case in cases if _holds(case, leaf, values))
    if "by" in case:
        words = {name: word for name, word in case.items() if name not in ("by", "is", "if")}
        return cast("Result", FUNCTIONS[case["by"]](leaf, values, **words))
    if "why" in case:
        return LeftOut(_filled(case["why"], leaf, values), quiet=case.get("quiet", False))
    targets = [case["to"]] if isinstance(case["to"], str) else case["to"]
    paths = [target.replace("{key}", str(leaf.path[-1])) for target in targets]
    note = _filled(case["note"], leaf, values) if "note" in case else None
    if "value" in case:
        also = (shared_rules.new(path, value) for path, value in case.get("also", {}).items())
        return *(shared_rules.new(path, case["value"], note) for path in paths), *also
    if isinstance(leaf.node, MappingNode):
        return LeftOut("it is empty", quiet=True)
    return tuple(shared_rules.same(path, leaf, note) for path in paths)


def _holds(case: Mapping[str, Any], leaf: Leaf, values: Values) -> bool:
    own = "is" not in case or _is(values.of(leaf), case["is"])
    return own and all(_is(_other(name, leaf, values), wanted) for name, wanted in case.get("if", {}).items())


def _is(value: Any, wanted: bool | str | Sequence[str]) -> bool:
    """Return whether a value has the truth value `wanted`, passes the test of that name, or is one of these texts."""
    if isinstance(wanted, bool):
        return bool(value) is wanted
    return _TESTS[wanted](value) if isinstance(wanted, str) else str(value).lower() in wanted


def _other(name: str, leaf: Leaf, values: Values) -> Any:
    """Return the first known value of the keys `a|b`, or the result of the function `name()`."""
    if name.endswith("()"):
        return FUNCTIONS[name.removesuffix("()")](values)
    name = name.replace("{key}", str(leaf.path[-1]))
    keys = [f"{format_path(leaf.path[:-1])}{key}" if key.startswith(".") else key for key in name.split("|")]
    return next((value for key in keys if (value := values.get(key)) is not None), None)


def _filled(text: str, leaf: Leaf, values: Values) -> str:
    """Return a text of a row with its fields filled in."""

    def field(match: re.Match[str]) -> str:
        name = match[1]
        return str(leaf.path[-1] if name == "key" else _other(name, leaf, values) if name else values.of(leaf))

    return _FIELD.sub(field, text)


@cache
def _patterns(project: str) -> list[tuple[re.Pattern[str], LeftOut]]:
    """Return patterns of keys with their reasons, the longest pattern first."""
    rows = [
        (pattern, LeftOut(row["why"], quiet=row.get("quiet", False)))
        for row in foreign_table()["reasons"]
        for pattern in row.get(project, ())
    ]
    rows.sort(key=lambda row: len(row[0]), reverse=True)
    return [(re.compile(fnmatch.translate(pattern)), reason) for pattern, reason in rows]


def reason_of(project: Project, path: Path) -> LeftOut:
    """Return the reason for leaving out a key that no rule and no section knows."""
    name = format_path(tuple(segment for segment in path if not isinstance(segment, int)))
    return next(reason for pattern, reason in _patterns(str(project)) if pattern.match(name))


_SHARED: Final = "as in verl, all components share the GPUs"
_PLACES: Final[Path] = ("cluster", "component_placement")
# Components of the original that are not separate groups here.
_WITHIN: Final = {
    "inference": "the actor computes log probabilities itself",
}
# Components that act, which are left out of a file without an environment, as it only learns from demonstrations.
_ACTING: Final = dict.fromkeys(("env", "rollout"), "the file names no environment that a policy could be evaluated in")
# The numbers of CPU processes that score answers and that run agents.
_REWARD_PROCESSES: Final = 4
_AGENT_PROCESSES: Final = 4
# Keys of `env.eval` that define the environment of the policy.
_OF_BOTH: Final = ("env_type", "task", "options", "total_num_envs")


def _machines(values: Values, gpus_per_node: int) -> Iterator[Added]:
    """Yield the values of a verl file's machines that the file leaves to defaults."""
    nodes = values.count("trainer.nnodes", 1)
    if values.get("trainer.nnodes") is None:
        yield Added(("cluster", "num_nodes"), nodes, "verl's default")
    yield Added(("cluster", "node_groups", 0, "label"), "gpus", "the file's machines")
    yield Added(
        ("cluster", "node_groups", 0, "node_ranks"), f"0-{nodes - 1}" if nodes > 1 else 0, "the file's machines"
    )
    if values.get("trainer.n_gpus_per_node") is None:
        yield Added(("cluster", "node_groups", 0, "accelerators", "per_node"), gpus_per_node, "verl's default")


def sft_places(values: Values) -> Iterator[Added]:
    """Yield the placement of verl's fine-tuning: one group on all GPUs."""
    yield from _machines(values, 1)
    gpus = values.count("trainer.nnodes", 1) * values.count("trainer.n_gpus_per_node", 1)
    yield Added((*_PLACES, "actor", "node_group"), "gpus", "one group trains on all GPUs")
    yield Added((*_PLACES, "actor", "placement"), f"0-{gpus - 1}" if gpus > 1 else "0", "one group trains on all GPUs")


def verl_places(values: Values) -> Iterator[Added]:
    """Yield the placement for a verl file, where all components take turns on all GPUs."""
    yield from _machines(values, 8)
    gpus = values.count("trainer.nnodes", 1) * values.count("trainer.n_gpus_per_node", 8)
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
    engines = gpus // tensor if engine(values) == "vllm" and tensor > 1 and gpus % tensor == 0 else gpus
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
    """The new name of a key of `component_placement`, empty if nothing remains, and the reason."""

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


def acts_alone(tree: MappingNode) -> bool:
    """Return whether a file of RLinf only evaluates a policy: it places a `rollout`, and has no `actor.model`."""
    placement = find(tree, _PLACES)
    components = placed(placement if isinstance(placement, MappingNode) else None)
    return "rollout" in components and find(tree, ("actor", "model")) is None


def evaluation_needs(tree: MappingNode, present: Collection[Path]) -> Iterator[Added]:
    """Yield the values that an evaluation needs here, such as an `actor` group that holds the weights."""
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


def agent_needs(tree: MappingNode) -> Iterator[Added]:
    """Yield the values that agents need here: placements, tools, and the documents of `search`."""
    why = f"agents run in a separate group of {_AGENT_PROCESSES} CPU processes"
    yield Added((*_PLACES, "agent", "node_group"), "node", why)
    yield Added((*_PLACES, "agent", "placement"), f"0:0-{_AGENT_PROCESSES - 1}", why)
    tools = agent_tools(tree)
    yield Added(("agent", "tools"), tools, "the section `tools` names them")
    if "search" in tools:
        yield Added(("agent", "tool_format"), "plain", "calls are written `<search>words</search>`")
        documents, at = ReferenceText("${env:SEARCH_DOCUMENTS}"), ("agent", "tool_options", "corpus_path")
        yield Added(at, documents, "the documents, one a line, in the place of the file's server")
