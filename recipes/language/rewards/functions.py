"""Reward functions of a user's own."""

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
from recipes.language.rewards.signatures import Signature, detect_convention, to_numbers
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt

# The names under which functions say whether an answer is right, apart from its reward.
_CORRECT: Final = ("correct", "acc")
_LARGEST: Final = 3.4e38
_LONGEST_NAME: Final = 100


class RewardAdapter:
    """A reward function, called by its own convention with the arguments that it names.

    Args:
        function: the function.
        name: its name, for messages.

    Attributes:
        is_async: whether it is a coroutine function.
        takes_lists: whether it judges several answers at once, by lists.
        convention: the convention by which it is called.

    Raises:
        ConfigError: it follows no convention that is known.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self._function = function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  the method of an object that is called like a function
        )
        self._signature = Signature.of(function)
        self.convention = detect_convention(self._signature, name or getattr(function, "__name__", "function"))
        self.takes_lists = self.convention in ("trl", "openrlhf", "verl batch")

    def __call__(self, item: Item) -> Verdict:
        """Return the verdict of one answer.

        Raises:
            TypeError: the function returns neither a number nor a mapping with `reward`.
            ValueError: a number that it returns is not finite.
        """
        if self.takes_lists:
            return self.judged([item])[0]
        result = self._called(item)
        return to_verdict(asyncio.run(result) if inspect.iscoroutine(result) else result)

    async def result_of(self, item: Item) -> Verdict:
        """Return the verdict of an asynchronous function; its exceptions propagate."""
        return to_verdict(await self._called(item))

    def judged(self, items: Sequence[Item]) -> list[Verdict]:
        """Return the verdicts of a function that takes lists; its exceptions propagate."""
        arguments = {name: values for name, values in self._lists(items).items() if self._wants(name)}
        result = self._function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return [to_verdict(entry) for entry in to_numbers(result, len(items))]

    def _wants(self, name: str) -> bool:
        return self._signature.takes_all or name in self._signature.names

    def _called(self, item: Item) -> Any:
        ours: dict[str, Any] = {
            "prompt": item.prompt,
            "text": item.text,
            "answer": item.answer,
            "tokens": list(item.tokens),
            "row": item.row,
        }
        theirs: dict[str, Any] = {
            "data_source": item.row.get("data_source", ""),
            "solution_str": item.text,
            "ground_truth": item.answer,
            "extra_info": _extra_info(item.row),
        }
        names = self._signature.names
        arguments = {name: value for name, value in ours.items() if self._wants(name)} if self._keeps_ours else {}
        arguments |= {name: value for name, value in ours.items() if name in names}
        arguments |= {name: value for name, value in theirs.items() if name in names}
        return self._function(**arguments)

    @property
    def _keeps_ours(self) -> bool:
        # A verl function with `**kwargs` gets only verl's arguments.
        return self.convention == "ours"

    def _lists(self, items: Sequence[Item]) -> dict[str, list[Any]]:
        if self.convention == "openrlhf":
            return {
                "queries": [item.prompt + item.text for item in items],
                "prompts": [item.prompt for item in items],
                "labels": [item.answer for item in items],
            }
        if self.convention == "verl batch":
            return {
                "data_sources": [item.row.get("data_source", "") for item in items],
                "solution_strs": [item.text for item in items],
                "ground_truths": [item.answer for item in items],
                "extra_infos": [_extra_info(item.row) for item in items],
            }
        # As in a table, what one row has and another lacks is None there.
        names = dict.fromkeys(name for item in items for name in item.row)
        columns = {name: [item.row.get(name) for item in items] for name in names}
        answers = [item.answer for item in items]
        # A conversation is answered by a message, as the data set's prompts are messages.
        chats = all(item.messages for item in items)
        return {
            "answer": answers,
            "ground_truth": answers,
            **{name: values for name, values in columns.items() if name not in ("prompt", "completion")},
            "prompts": [list(item.messages) if chats else item.prompt for item in items],
            "completions": [[{"role": "assistant", "content": item.text}] if chats else item.text for item in items],
            "completion_ids": [list(item.tokens) for item in items],
        }


def _extra_info(row: Mapping[str, Any]) -> Any:
    """Return the column `extra_info` of a row; of a row without one the row itself."""
    return row.get("extra_info", row)


def to_verdict(result: Any) -> Verdict:
    """Convert the result of a reward function to a verdict.

    A mapping has `reward` (or `score`); `correct` (or `acc`) says whether the answer is right, whatever its reward;
    texts in it are for people, and other entries are metrics.

    Raises:
        TypeError: it is neither a number nor a mapping with `reward` (or `score`) and further numbers.
        ValueError: a number in it is not finite, or the name of a metric is not printable, empty or too long.
    """
    if not isinstance(result, Mapping):
        return Verdict(_finite("reward", result), "by the function")
    entries = {str(name): value for name, value in cast("Mapping[Any, Any]", result).items()}
    key = next((key for key in ("reward", "score") if key in entries), None)
    if key is None:
        raise TypeError("the mapping that the reward function returned has no `reward`")
    reward = _finite(key, entries.pop(key))
    right = next((_truth(name, entries.pop(name)) for name in _CORRECT if name in entries), None)
    # Names are those of metrics, in files, on terminals and in backends.
    odd = next((name for name in entries if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable()), None)
    if odd is not None:
        raise ValueError(
            f"a figure is called {excerpt(ascii(odd), 40)}: a name has 1 to {_LONGEST_NAME} printable characters"
        )
    texts = [value for value in entries.values() if isinstance(value, str)]
    figures = {name: _finite(name, value) for name, value in entries.items() if not isinstance(value, str | None)}
    return Verdict(reward, ", ".join(["by the function", *texts])[:200], figures, right)


def _truth(name: str, value: Any) -> bool:
    number = _finite(name, value)
    if number not in (0.0, 1.0):
        raise ValueError(f"`{name}` is {number:g}, neither true nor false")
    return bool(number)


def _finite(name: str, value: Any) -> float:
    # float("0.5") is not a number that was returned.
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise TypeError(f"`{name}` is {type(value).__name__}, not a number")
    array: Any = value
    shape: tuple[int, ...] = tuple(getattr(array, "shape", ()))
    if math.prod(shape) != 1:
        raise TypeError(f"`{name}` is an array of shape {list(shape)}, not a number")
    try:
        number = float(array.reshape(()) if shape else array)
    except OverflowError:
        number = math.inf
    # Rewards are float32.
    if not abs(number) <= _LARGEST:
        raise ValueError(f"`{name}` is {number}, not a finite number of float32")
    return number


def load_function(name: str) -> Callable[..., Any]:
    """Return the reward function that `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported, or is not a function.
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
