"""Reward functions of a user's own."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from recipes.language.rewards.rules import Verdict
from recipes.language.rewards.scoring import Item
from rlinf_core import ConfigError

# Names of arguments in other projects' reward functions, by ours.
_OTHER_ARGUMENTS: Final = {"solution_str": "text", "ground_truth": "answer", "extra_info": "row"}


class RewardAdapter:
    """A reward function, called with those of `prompt`, `text`, `answer`, `tokens` and `row` that it names.

    A function that names none of them is called with `text` and `answer`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  the method of an object that is called like a function
        )
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        self._names = {each.name for each in parameters}

    def __call__(self, item: Item) -> Verdict:
        """Return the verdict of a function that is not asynchronous.

        Raises:
            TypeError: it returns neither a number nor a mapping with `reward`.
            ValueError: a number that it returns is not finite.
        """
        found = self._called(item)
        return verdict_of(asyncio.run(found) if inspect.iscoroutine(found) else found)

    async def result_of(self, item: Item) -> Verdict:
        """Return the verdict of an asynchronous function. Raises what a call does."""
        return verdict_of(await self._called(item))

    def _called(self, item: Item) -> Any:
        offered: dict[str, Any] = {
            "prompt": item.prompt,
            "text": item.text,
            "answer": item.answer,
            "tokens": list(item.tokens),
            "row": item.row,
        }
        given = {name: value for name, value in offered.items() if self._takes_all or name in self._names}
        given |= {other: offered[ours] for other, ours in _OTHER_ARGUMENTS.items() if other in self._names}
        if "data_source" in self._names:
            given["data_source"] = item.row.get("data_source", "")
        return self._function(**given) if given else self._function(item.text, item.answer)


def verdict_of(result: Any) -> Verdict:
    """Return what a reward function returned as a verdict.

    Raises:
        TypeError: it is neither a number nor a mapping with `reward` (or `score`) and further numbers.
        ValueError: a number in it is not finite.
    """
    if not isinstance(result, Mapping):
        return Verdict(_finite("reward", result), "by the function")
    figures = {str(name): _finite(str(name), value) for name, value in cast("Mapping[Any, Any]", result).items()}
    for key in ("reward", "score"):
        if key in figures:
            return Verdict(figures.pop(key), "by the function", figures)
    raise TypeError("the mapping that the reward function returned has no `reward`")


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` is {number}")
    return number


def load_function(name: str) -> Callable[..., Any]:
    """Return the reward function that `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001  a user's module may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"the reward function `{name}` cannot be imported", why=why) from None
    if not callable(found):
        raise ConfigError(f"`{name}` is no function", help="give `package.module:function`")
    return cast("Callable[..., Any]", found)
