"""Calling conventions of reward functions: rlinf's, and those of verl, TRL and OpenRLHF, detected by argument names.

Signatures can be read from source, too, to check a configuration without importing the function.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from rlinf_core import ConfigError
from rlinf_core.process.import_path import locate, syntax_tree

if TYPE_CHECKING:
    from recipes.language.rewards.scoring import Item

Convention: TypeAlias = Literal["ours", "verl", "verl batch", "trl", "openrlhf"]

# What an argument of each kind of function is for an answer; verl's batches and OpenRLHF's are lists of it.
Arguments: TypeAlias = "Mapping[str, Callable[[Item], Any]]"
OURS: Final[Arguments] = {
    "prompt": lambda item: item.prompt,
    "text": lambda item: item.text,
    "answer": lambda item: item.answer,
    "tokens": lambda item: list(item.tokens),
    "row": lambda item: item.row,
}
VERL: Final[Arguments] = {
    "data_source": lambda item: item.row.get("data_source", ""),
    "solution_str": lambda item: item.text,
    "ground_truth": lambda item: item.ground_truth,
    "extra_info": lambda item: item.row.get("extra_info", item.row),
}
VERL_BATCH: Final[Arguments] = {f"{name}s": value for name, value in VERL.items()}
OPENRLHF: Final[Arguments] = {
    "queries": lambda item: item.prompt + item.text,
    "prompts": lambda item: item.prompt,
    "labels": lambda item: item.ground_truth,
}
# TRL also passes each column of the data set by name; its `trainer_state` does not exist here.
TRL: Final = frozenset(("prompts", "completions", "completion_ids"))

_ACCEPTED: Final = (
    "name arguments of one kind: ours (any of prompt, text, answer, tokens, row), verl's (data_source, solution_str,"
    " ground_truth, extra_info), TRL's (prompts, completions, **columns) or OpenRLHF's (queries, prompts, labels)"
)


class Signature(NamedTuple):
    """The arguments that a function can be called with.

    Attributes:
        names: the parameters that may be given by name.
        required: those of them without a default.
        positional: the positional-only parameters.
        takes_all: whether the function has `**kwargs`.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    positional: tuple[str, ...] = ()
    takes_all: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Return the signature of a function.

        Raises:
            ConfigError: the signature cannot be read, as of some C functions.
        """
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError("the arguments of the reward function cannot be read", why=str(error)) from None
        kinds = inspect.Parameter
        named = [
            parameter for parameter in parameters if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        ]
        return cls(
            names=tuple(parameter.name for parameter in named),
            required=frozenset(parameter.name for parameter in named if parameter.default is kinds.empty),
            positional=tuple(parameter.name for parameter in parameters if parameter.kind is kinds.POSITIONAL_ONLY),
            takes_all=any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters),
        )


def detect_convention(signature: Signature, name: str) -> Convention:
    """Return the calling convention of a reward function.

    Args:
        signature: the signature of the function.
        name: the name of the function, for messages.

    Raises:
        ConfigError: the function follows no convention, or requires an argument outside of its convention.
    """
    if signature.positional:
        raise _refused(name, f"`{signature.positional[0]}` is positional-only, but arguments are passed by name")
    names, required = frozenset(signature.names), signature.required
    if "completions" in names:
        # Its other arguments are columns of the data set.
        return "trl"
    known: dict[Convention, Arguments] = {"verl batch": VERL_BATCH, "openrlhf": OPENRLHF, "verl": VERL, "ours": OURS}
    for convention, telling in known.items():
        shown = sorted(names & telling.keys())
        if shown:
            offered = {*telling, *OURS} if convention == "verl" else {*telling}
            strange = sorted(required - offered)
            if strange:
                raise _refused(name, f"it requires `{strange[0]}` besides `{shown[0]}`")
            return convention
    if required:
        raise _refused(name, f"`{sorted(required)[0]}` is not an argument of reward functions")
    if not signature.takes_all:
        raise _refused(name, "it takes none of the arguments of reward functions")
    return "ours"


def missing_columns(signature: Signature, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that a TRL reward function requires but no row has."""
    offered = TRL | {"answer", "ground_truth"} | {name for row in rows for name in row}
    return sorted(signature.required - offered)


def signature_in_source(target: str) -> Signature | None:
    """Return the signature of `package.module:function` from its source, without importing the module.

    None if the source does not show it, as for decorated or imported functions and other objects.
    """
    module, _, name = target.partition(":")
    try:
        spec = locate(module)
        tree = syntax_tree(spec) if spec is not None else None
    except ValueError:  # reported elsewhere
        tree = None
    if tree is None:
        return None
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list
    ]
    # Skip names that are local to functions and classes.
    outside = [
        node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    nodes = [node for statement in outside for node in ast.walk(statement)]
    bound = [node for node in nodes if isinstance(node, ast.Name | ast.alias) and _binds(node, name)]
    if len(functions) != 1 or bound:
        return None
    arguments = functions[0].args
    plain, defaults = arguments.args, len(arguments.defaults)
    required = [parameter.arg for parameter in plain[: len(plain) - defaults]]
    required += [
        parameter.arg
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return Signature(
        names=tuple(parameter.arg for parameter in (*plain, *arguments.kwonlyargs)),
        required=frozenset(required),
        positional=tuple(parameter.arg for parameter in arguments.posonlyargs),
        takes_all=arguments.kwarg is not None,
    )


def _binds(node: ast.Name | ast.alias, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return (node.asname or node.name) == name


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"the reward function `{name}` cannot be called", why=why, help=_ACCEPTED)


def to_numbers(result: Any, count: int) -> Sequence[Any]:
    """Convert the result of a function that scores several answers to one result per answer.

    Lists, tensors and arrays have an entry per answer; a mapping has rewards under `rewards` or `scores` (OpenRLHF),
    and further metrics under `extra_logs`.

    Raises:
        TypeError: the result is neither a list nor a mapping with rewards.
        ValueError: the number of entries is not `count`.
    """
    if isinstance(result, Mapping):
        entries = cast("Mapping[str, Any]", result)
        rewards = next((entries[key] for key in ("rewards", "scores") if key in entries), None)
        if rewards is None:
            raise TypeError("the mapping that the reward function returned has no `rewards`")
        logs = cast("Mapping[str, Any]", entries.get("extra_logs") or {})
        figures = {name: _listed(values, count) for name, values in logs.items()}
        listed = _listed(rewards, count)
        return [
            {"reward": listed[index], **{name: values[index] for name, values in figures.items()}}
            for index in range(count)
        ]
    return _listed(result, count)


def _listed(values: Any, count: int) -> list[Any]:
    plain: Any = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, list | tuple):
        raise TypeError(f"the reward function returned {type(values).__name__}, not a list of {count} rewards")
    entries = cast("Sequence[Any]", plain)
    if len(entries) != count:
        raise ValueError(f"the reward function returned {len(entries)} rewards for {count} answers")
    return list(entries)
