"""Custom reward functions, by rlinf's calling convention or that of verl, TRL or OpenRLHF, detected by argument names.

Signatures can be read from source, too, to check a configuration without importing the function.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from recipes.language.rewards.matching.rules import Verdict
from recipes.language.rewards.scoring import Item
from rlinf_core import ConfigError
from rlinf_core.process.import_path import locate, syntax_tree
from rlinf_core.suggest import excerpt

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
_VERL_BATCH: Final[Arguments] = {f"{name}s": value for name, value in VERL.items()}
_OPENRLHF: Final[Arguments] = {
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
    known: dict[Convention, Arguments] = {"verl batch": _VERL_BATCH, "openrlhf": _OPENRLHF, "verl": VERL, "ours": OURS}
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


def _to_numbers(result: Any, count: int) -> Sequence[Any]:
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


_SHOWN: Final = (str, list, tuple, dict)
_LARGEST: Final = 3.4e38
_LONGEST_NAME: Final = 100


class RewardAdapter:
    """An adapter that calls a reward function by its convention, with the arguments that it names.

    Args:
        function: the function.
        name: the name of the function, for messages.

    Attributes:
        is_async: whether the function is a coroutine function.
        takes_lists: whether the function takes lists of answers.
        convention: the convention by which the function is called.

    Raises:
        ConfigError: the function follows no known convention.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self._function = function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  the method of an object that is called like a function
        )
        self._signature = Signature.of(function)
        self.convention = detect_convention(self._signature, name or getattr(function, "__name__", "function"))
        self.takes_lists = self.convention in ("trl", "openrlhf", "verl batch")
        # All calls share an event loop, to which clients and semaphores of the function's module belong.
        self._runner = asyncio.Runner()

    def __call__(self, item: Item) -> Verdict:
        """Return the verdict of one answer.

        Raises:
            TypeError: the function returns neither a number nor a mapping with `reward`.
            ValueError: the function returns a number that is not finite.
        """
        if self.takes_lists:
            return to_verdict(self.results([item])[0])
        return to_verdict(self._awaited(self._called(item)))

    async def result_of(self, item: Item) -> Verdict:
        """Return the verdict of an asynchronous function; its exceptions propagate."""
        return to_verdict(await self._called(item))

    def results(self, items: Sequence[Item]) -> Sequence[Any]:
        """Return the result of each answer from a function that takes lists; its exceptions propagate."""
        arguments = {name: values for name, values in self._lists(items).items() if self._wants(name)}
        return _to_numbers(self._awaited(self._function(**arguments)), len(items))

    def _awaited(self, result: Any) -> Any:
        return self._runner.run(result) if inspect.iscoroutine(result) else result

    def _wants(self, name: str) -> bool:
        return self._signature.takes_all or name in self._signature.names

    def _called(self, item: Item) -> Any:
        names = {*self._signature.names}
        # A verl function with `**kwargs` gets only what it names.
        if self.convention == "ours" and self._signature.takes_all:
            names |= {*OURS}
        return self._function(**{name: value(item) for name, value in {**OURS, **VERL}.items() if name in names})

    def _lists(self, items: Sequence[Item]) -> dict[str, list[Any]]:
        if self.convention != "trl":
            arguments = _OPENRLHF if self.convention == "openrlhf" else _VERL_BATCH
            return {name: [value(item) for item in items] for name, value in arguments.items()}
        # As in a table, a value that a row lacks is None.
        names = dict.fromkeys(name for item in items for name in item.row)
        columns = {name: [item.row.get(name) for item in items] for name in names}
        answers = [item.ground_truth for item in items]
        # If prompts are messages, so are completions.
        chats = all(item.messages for item in items)
        return {
            "answer": answers,
            "ground_truth": answers,
            **{name: values for name, values in columns.items() if name not in ("prompt", "completion")},
            "prompts": [list(item.messages) if chats else item.prompt for item in items],
            "completions": [[{"role": "assistant", "content": item.text}] if chats else item.text for item in items],
            "completion_ids": [list(item.tokens) for item in items],
        }


def to_verdict(result: Any) -> Verdict:
    """Convert the result of a reward function to a verdict.

    A mapping has `reward` (or `score`); `correct` says whether the answer is right, whatever its reward; `acc` of verl,
    which may be a part of 1, says so by 1; texts, lists and mappings are shown to people, and other entries are
    metrics.

    Raises:
        TypeError: the result is neither a number nor a mapping with `reward` (or `score`) and further numbers.
        ValueError: a number in it is not finite, or the name of a metric is not printable, empty or too long.
    """
    if not isinstance(result, Mapping):
        return Verdict(finite("reward", result), "by the function")
    entries = {str(name): value for name, value in cast("Mapping[Any, Any]", result).items()}
    key = next((key for key in ("reward", "score") if key in entries), None)
    if key is None:
        raise TypeError("the mapping that the reward function returned has no `reward`")
    reward = finite(key, entries.pop(key))
    right = next((_truth(name, entries.pop(name)) for name in ("correct", "acc") if name in entries), None)
    # The names become metrics in files, on terminals and in backends.
    odd = next((name for name in entries if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable()), None)
    if odd is not None:
        raise ValueError(
            f"a figure is called {excerpt(ascii(odd), 40)}: a name has 1 to {_LONGEST_NAME} printable characters"
        )
    shown: list[object] = [value for value in entries.values() if isinstance(value, _SHOWN)]
    figures = {
        name: finite(name, value)
        for name, value in entries.items()
        if value is not None and not isinstance(value, _SHOWN)
    }
    return Verdict(reward, ", ".join(["by the function", *map(str, shown)])[:200], figures, right)


def _truth(name: str, value: Any) -> bool:
    number = finite(name, value)
    if name == "correct" and number not in (0.0, 1.0):
        raise ValueError(f"`{name}` is {number:g}, neither true nor false")
    return number >= 1


def finite(name: str, value: Any) -> float:
    """Return the number that a function of the user's gave, also as an array of one.

    Raises:
        TypeError: the value is not a number; a text such as "0.5" is none.
        ValueError: the number is not finite in float32, the type of rewards.
    """
    # Texts of numpy have `__float__`.
    if isinstance(value, str | bytes) or not (isinstance(value, numbers.Real) or hasattr(value, "__float__")):
        raise TypeError(f"`{name}` is {type(value).__name__}, not a number")
    array: Any = value
    shape: tuple[int, ...] = tuple(getattr(array, "shape", ()))
    if math.prod(shape) != 1:
        raise TypeError(f"`{name}` is an array of shape {list(shape)}, not a number")
    try:
        number = float(array.reshape(()) if shape else array)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise ValueError(f"`{name}` is {number}, not a finite number of float32")
    return number


def load_function(name: str) -> Callable[..., Any]:
    """Return the reward function that `package.module:function` names.

    Raises:
        ConfigError: the function cannot be imported, or is not callable.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001  a user's module may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"the reward function `{name}` cannot be imported", why=why) from None
    if not callable(function):
        raise ConfigError(f"`{name}` is not a function", help="give `package.module:function`")
    return cast("Callable[..., Any]", function)
