"""Custom reward functions."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from recipes.language.rewards.matching.rules import Verdict
from recipes.language.rewards.scoring import Item
from recipes.language.rewards.signatures import (
    OPENRLHF,
    OURS,
    VERL,
    VERL_BATCH,
    Signature,
    detect_convention,
    to_numbers,
)
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

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
        return to_numbers(self._awaited(self._function(**arguments)), len(items))

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
            arguments = OPENRLHF if self.convention == "openrlhf" else VERL_BATCH
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
