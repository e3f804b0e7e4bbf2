"""Loading of the problems that section `data` names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from recipes.language.config.problem_config import MOST_GENERATED, LanguageDataConfig
from recipes.language.data.problem_sources import Joined, ReasoningGym, Sums, read_file
from recipes.language.data.problems import Problem, ProblemSet
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
