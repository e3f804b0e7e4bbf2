"""The points of a sweep: every combination of the values that the command line gives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rlinf_core.errors import ConfigError

MOST_POINTS: Final = 1000
_LONGEST_NAME: Final = 80
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.]+")
_OPENING: Final = {"[": "]", "{": "}", "(": ")"}


class Axis(NamedTuple):
    """A key and its values, as they are typed."""

    key: str
    values: tuple[str, ...]


class Point(NamedTuple):
    """One combination of values.

    Attributes:
        name: the name of its run, unique within the sweep: `03-lr-1e-4-seed-1`.
        values: the swept values by key, and the seed under `seed`; as they are typed.
        overrides: what `rlinf train` gets for them.
    """

    name: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]


def axes_of(overrides: Sequence[str]) -> list[Axis]:
    """Return the keys with several values, separated by commas.

    A comma in brackets, braces or quotes belongs to one value: `agent.tools=[a,b]` is a list.

    Raises:
        ConfigError: a value is empty or given twice, or a key has two axes.
    """
    axes: list[Axis] = []
    for override in overrides:
        key, _, text = override.partition("=")
        values = split_values(text)
        _check(override, key, values, axes)
        axes.append(Axis(key, tuple(values)))
    return axes


def _check(override: str, key: str, values: Sequence[str], axes: Sequence[Axis]) -> None:
    if any(axis.key == key for axis in axes):
        raise ConfigError(f"`{key}` is swept twice", where=override, help="give all of its values at once")
    if "" in values:
        raise ConfigError(
            "a value of the sweep is empty",
            where=override,
            help="remove the comma too many, or write the text in quotes: `KEY='\"a,b\"'`",
        )
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ConfigError(f"the value `{twice}` is given twice", where=override, help="use `--seeds N` to repeat runs")


def split_values(text: str) -> list[str]:
    """Return the parts of `text` between its commas, but those in brackets, braces or quotes."""
    parts: list[str] = []
    part = closing = quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not part.strip():
            # Elsewhere it is an apostrophe.
            quote = character
        elif character in "\"'" and closing:
            quote = character
        elif character in _OPENING:
            closing += _OPENING[character]
        elif closing and character == closing[-1]:
            closing = closing[:-1]
        elif character == "," and not closing:
            parts.append(part.strip())
            part = ""
            continue
        part += character
    return [*parts, part.strip()]


def points_of(axes: Sequence[Axis], seeds: Sequence[Mapping[str, int]]) -> list[Point]:
    """Return all combinations; those of one point's seeds follow each other.

    Args:
        axes: the swept keys.
        seeds: the seed keys and their values, for each repetition; empty: the file's own seeds, once.

    Raises:
        ConfigError: there are more than `MOST_POINTS`.
    """
    count = len(seeds) or 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        raise ConfigError(f"the sweep has {count} runs, at most are {MOST_POINTS}", help="give fewer values or seeds")
    points: list[Point] = []
    for combination in itertools.product(*(axis.values for axis in axes)):
        values = dict(zip((axis.key for axis in axes), combination, strict=True))
        for number, seed in enumerate(seeds or ({},)):
            seeded = {**values, "seed": str(number)} if seeds else values
            overrides = [*values.items(), *((key, str(value)) for key, value in seed.items())]
            points.append(
                Point(
                    _name(len(points) + 1, len(str(count)), seeded),
                    seeded,
                    tuple(f"{key}={value}" for key, value in overrides),
                )
            )
    return points


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ending of each dotted key that no other key has: `lr` of `actor.optim.lr`."""
    names: dict[str, str] = {}
    for key in keys:
        words = key.split(".")
        endings = [".".join(words[-length:]) for length in range(1, len(words) + 1)]
        others = [other for other in keys if other != key]
        names[key] = next(
            (ending for ending in endings if not any(f".{other}".endswith(f".{ending}") for other in others)), key
        )
    return names


def _name(number: int, digits: int, values: Mapping[str, str]) -> str:
    short = short_keys(list(values))
    words = [f"{short[key]}-{value}" for key, value in values.items()]
    slug = _UNSAFE.sub("-", "-".join(words)).strip("-.")[:_LONGEST_NAME].rstrip("-.")
    return f"{number:0{max(2, digits)}d}-{slug}"
