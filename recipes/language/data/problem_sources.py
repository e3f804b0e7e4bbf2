"""The problems that section `data` names: generated sums, rows of files, reasoning-gym tasks."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, cast

from recipes.language.config.problem_config import MOST_GENERATED, LanguageDataConfig
from recipes.language.data.data_rows import located_rows
from recipes.language.data.problems import Problem, ProblemSet
from recipes.language.text.chat_messages import ALIGNED_SUFFIX, Message, read_messages
from rlinf_core import ConfigError

# reasoning-gym makes problem i of a data set from seed + i. The seeds of training and evaluation are this far apart,
# which bounds `train_size` and `val_size`.
_SEED_DISTANCE = MOST_GENERATED


def load_problems(config: LanguageDataConfig, *, evaluation: bool) -> ProblemSet:
    """Return the problems of training or of evaluation.

    Without files for evaluation, every tenth problem of the training files is held out.

    Raises:
        ConfigError: a file cannot be read, is empty or lacks a key, or a package is missing.
    """
    if config.source == "sums":
        return Sums(
            config.settings.digits,
            held_out=evaluation,
            size=config.val_size,
            seed=config.seed,
            spaced=config.settings.spaced,
        )
    if config.source == "reasoning_gym":
        size = config.val_size if evaluation else config.settings.train_size
        seed = config.seed * 2 * _SEED_DISTANCE + (_SEED_DISTANCE if evaluation else 0)
        return ReasoningGym(config.settings.task or "", size, seed, config.task_settings)
    # A run that only evaluates may have no training files.
    paths = config.train_files or config.val_data_paths
    paths = config.val_data_paths if evaluation and config.val_data_paths else paths
    names = data_set_names(paths)
    parts = [
        read_file(path, config.prompt_key, config.answer_key, name) for path, name in zip(paths, names, strict=True)
    ]
    whole, numbers = Joined(parts), range(sum(map(len, parts)))
    if not config.val_data_paths:
        numbers = [n for n in numbers if (n % 10 == 9) == evaluation]
    if any(config.train_weights) and not evaluation and numbers:
        sizes = [len(part) for part in parts]
        return Chosen(whole, mixed(numbers, sizes, [*map(_share, config.train_weights, sizes)]))
    if config.val_data_paths:
        return whole
    if not numbers:
        raise ConfigError(
            f"{len(whole)} problems are too few to hold some out for evaluation",
            help="set `data.val_data_paths`, or give at least ten problems",
        )
    return Chosen(whole, numbers)


def _share(weight: float | None, size: int) -> float:
    return size if weight is None else weight


def mixed(numbers: Sequence[int], sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return an epoch in which data sets have their shares, and every problem occurs at least once.

    The data set with the most problems for its share is used once; the problems of the others are repeated in turn, so
    that shares are exact to one problem.

    Args:
        numbers: the numbers of the training problems, ascending.
        sizes: the number of problems of each data set, in order.
        shares: the share of each data set; only their ratios matter.
    """
    rows: list[list[int]] = []
    end = 0
    for size in sizes:
        start, end = end, end + size
        rows.append([number for number in numbers if start <= number < end])
    # The problems of an epoch per unit of share.
    unit = max(len(part) / share for part, share in zip(rows, shares, strict=True))
    return [
        number
        for part, share in zip(rows, shares, strict=True)
        if part
        for number in islice(cycle(part), round(unit * share))
    ]


def data_set_names(paths: Sequence[str]) -> list[str]:
    """Return file names without suffix, with as many folders as needed to distinguish them."""
    parts = [Path(path).with_suffix("").parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["_".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]}_{number}" for number, part in enumerate(parts)]


class Chosen:
    """A selection of the problems of a set."""

    def __init__(self, whole: ProblemSet, numbers: Sequence[int]) -> None:
        self._whole = whole
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Problem:
        return self._whole[self._numbers[index]]


class Joined:
    """Several sets of problems as one."""

    def __init__(self, parts: Sequence[ProblemSet]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __getitem__(self, index: int) -> Problem:
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


# The start of messages given as text: JSON, or a Python list.
_MESSAGES: Final = re.compile(r"\s*\[\s*\{\s*(?:\"|')(?:role|content)(?:\"|')\s*:")


class Sums:
    """Sums of two numbers with a maximum number of digits, written `3+4=`.

    Training and evaluation share no problem if there are more than twice `size`; else, as with the 100 one-digit sums,
    both use all.

    Args:
        digits: the maximum digits of a number, at least 1.
        held_out: whether this is the evaluation part.
        size: the number of problems of an evaluation.
        seed: the seed of the split.
        spaced: whether sums are written `3 + 4 =`.
    """

    def __init__(
        self, digits: int = 1, *, held_out: bool = False, size: int = 200, seed: int = 0, spaced: bool = False
    ) -> None:
        self._name = f"sums{digits}"
        self._format = "{} + {} =" if spaced else "{}+{}="
        self._base = 10**digits
        self._scatter = 1
        every = self._base**2
        if every <= 2 * size:
            self._numbers: Sequence[int] = range(every)
            return
        if every <= 10**6:
            order = list(range(every))
            random.Random(f"sums {seed}").shuffle(order)
            self._numbers = order[:size] if held_out else order[size:]
            return
        # Too many to list: multiples of `step` are held out, and `_scatter` spreads both parts over all sums.
        step = every // size
        self._numbers = range(0, step * size, step) if held_out else _AllBut(every, step)
        self._scatter = 6_700_417

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Problem:
        first, second = divmod(self._numbers[index] * self._scatter % self._base**2, self._base)
        answer = str(first + second)
        asked = self._format.format(first, second)
        return Problem(prompt=asked, answer=answer, difficulty=f"{len(answer)}-digit-answer", source=self._name)


class _AllBut(Sequence[int]):
    """The numbers below `count` that are not multiples of `step`."""

    def __init__(self, count: int, step: int) -> None:
        self._step = step
        self._size = count - -(-count // step)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        block, offset = divmod(index, self._step - 1)
        return block * self._step + offset + 1


class FileProblems:
    """The problems of a file.

    Args:
        name: the name of the data set.
        rows: one mapping for each problem.
        prompt_key, answer_key: the keys of the mappings; `a.b` is the key `b` of the mapping under `a`.
        where: the place of each row, for messages.
        aligned: whether a null within messages stands for a missing key.

    Attributes:
        places: the place of each row.

    Raises:
        ConfigError: a row lacks a key, its prompt is neither a text nor messages, or its answer is no value.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        prompt_key: str,
        answer_key: str,
        where: Sequence[str],
        *,
        aligned: bool = False,
    ) -> None:
        self._name = name
        self._rows = rows
        self._keys = prompt_key, answer_key
        self._aligned = aligned
        self.places = where
        for row, place in zip(rows, where, strict=True):
            prompt, answer = (
                _value(row, key, place, purpose) for purpose, key in zip(("prompt", "answer"), self._keys, strict=True)
            )
            answer = _answer(answer)
            try:
                prompt = _prompt(prompt, aligned=aligned)
            except ConfigError as error:
                why = error.message.removeprefix(": ")
                raise ConfigError(
                    f"{place}: the prompt under `{prompt_key}` is neither a text nor messages",
                    why=f"it is {_shown(prompt)}: {why}",
                    help='give a text, or a list of {"role": ..., "content": ...}',
                ) from None
            if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
                raise ConfigError(
                    f"{place}: the last message under `{prompt_key}` is the assistant's",
                    why="the model answers in a turn of its own, and does not continue one",
                    help="remove the message, or write its text into the user's",
                )
            if not (prompt if isinstance(prompt, str) else prompt[-1]["content"]).strip():
                raise ConfigError(f"{place}: the prompt under `{prompt_key}` is empty", help="remove the row")
            if not isinstance(answer, str | float | int | Decimal | date) or not _is_value(answer):
                raise ConfigError(
                    f"{place}: there is no answer under `{answer_key}`",
                    why=f"it is {_shown(answer)}",
                    help="give a text or a number; `data.answer_key: a.b` reaches into a mapping",
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Problem:
        row = self._rows[index]
        prompt, answer = (_value(row, key, "", "") for key in self._keys)
        prompt = _prompt(prompt, aligned=self._aligned)
        messages = () if isinstance(prompt, str) else prompt
        return Problem(
            prompt=prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt),
            answer=str(_answer(answer)),
            row=row,
            difficulty="" if (label := row.get("difficulty")) is None else str(label),
            source=self._name,
            messages=messages,
            source_answer=answer,
        )


def _answer(value: Any) -> Any:
    """Unwrap an answer from a list of one, as in AReaL's `solutions`."""
    if not isinstance(value, list):
        return value
    listed = cast("list[Any]", value)
    return listed[0] if len(listed) == 1 else listed


def _is_value(answer: object) -> bool:
    """Return whether an answer is no boolean and no infinite or NaN number."""
    return not isinstance(answer, bool) and (not isinstance(answer, float | Decimal) or math.isfinite(answer))


def _value(row: Mapping[str, Any], key: str, place: str, purpose: str) -> Any:
    """Return the value of a row under a key, which may be dotted."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(f"`{name}`" for name in row)
            raise ConfigError(
                f"{place}: there is no key `{key}`",
                why=f"the row has {known or 'no keys'}",
                help=f"set `data.{purpose}_key` to the key that holds the {purpose}",
            )
        value = cast("Mapping[str, Any]", value)[part]
    return value


def _prompt(value: Any, *, aligned: bool) -> str | tuple[Message, ...]:
    """Return a prompt as a text, or as messages, which may be given as JSON text.

    Raises:
        ConfigError: the value is neither; the message begins with `: `.
    """
    if isinstance(value, str) and not _MESSAGES.match(value):
        return value
    return read_messages(value, "", "prompt", aligned=aligned)


def _shown(value: Any, longest: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"`{text if len(text) <= longest else text[: longest - 3] + '...'}`"


def read_file(path: str, prompt_key: str, answer_key: str, name: str = "", most: int | None = None) -> FileProblems:
    """Return the problems in the first `most` rows of a `.jsonl` or `.parquet` file as a data set, named after the file
    by default.

    Raises:
        ConfigError: the file cannot be read, is empty, or a row lacks a key.
    """
    pairs, aligned = located_rows(path, most), Path(path).suffix == ALIGNED_SUFFIX
    rows, places = [row for _, row in pairs], [place for place, _ in pairs]
    return FileProblems(name or Path(path).stem, rows, prompt_key, answer_key, places, aligned=aligned)


def check_file(path: str, prompt_key: str, answer_key: str, rows: int = 200) -> FileProblems:
    """Return the problems in the first rows of a file; raises as `read_file` does."""
    return read_file(path, prompt_key, answer_key, most=rows)


class ReasoningGym:
    """A reasoning-gym task; the library generates and scores its problems.

    Args:
        task: the name of the task, such as `chain_sum`.
        size: the number of problems.
        seed: the seed of the first problem.
        config: further settings of the task.
    """

    def __init__(self, task: str, size: int, seed: int, config: Mapping[str, Any] | None = None) -> None:
        try:
            library = importlib.import_module("reasoning_gym")
        except ImportError:
            raise ConfigError(
                "`data.type: reasoning_gym` needs the package reasoning-gym", help="pip install reasoning-gym"
            ) from None
        try:
            self._data = library.create_dataset(task, size=size, seed=seed, **(config or {}))
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym cannot make the task `{task}`",
                why=str(error).splitlines()[0] if str(error) else type(error).__name__,
                help="`data.options` has its own names: `task`, and the settings of the task",
            ) from None
        self._task = task
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:
        entry = self._data[index]
        return Problem(
            prompt=str(entry["question"]),
            answer=str(entry["answer"]),
            row=entry,
            difficulty=_label(entry.get("metadata", {}).get("difficulty", "")),
            source=self._task,
        )

    def score(self, answer: str, index_row: Mapping[str, Any]) -> float:
        """Return the library's score of an answer to the problem `index_row`, 0 to 1."""
        return float(self._data.score_answer(answer, index_row))


def _label(difficulty: Any) -> str:
    """Return `num_terms=2-6` for {"num_terms": (2, 6)}."""
    if not isinstance(difficulty, Mapping):
        return str(difficulty)

    def text(value: Any) -> str:
        return "-".join(map(str, cast("Sequence[Any]", value))) if isinstance(value, tuple | list) else str(value)

    return ",".join(f"{key}={text(value)}" for key, value in cast("Mapping[str, Any]", difficulty).items())
