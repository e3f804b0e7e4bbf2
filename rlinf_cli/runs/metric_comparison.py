"""Comparison of runs: their differences, and whether their results differ by more than noise.

This module reads no files. All intervals are 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, Final, NamedTuple, cast

from rlinf_cli.runs.documents import Provenance
from rlinf_cli.runs.metric_columns import RunSeries, interval_of
from rlinf_core.runners.metrics import mean
from rlinf_core.runners.storage.resuming import FREE_KEYS

# The 97.5 % quantile of the normal distribution, for 95 % intervals.
_Z: Final = 1.959963984540054
# The 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


class Kind(StrEnum):
    """A kind of difference, in order of importance."""

    RECIPE = "recipe"
    EVALUATION = "evaluation protocol"
    CONFIG = "config"
    INPUTS = "data"
    CODE = "code"
    VERSIONS = "versions"
    PLACEMENT = "placement"
    MACHINE = "machine"
    SEEDS = "seeds"


class ConfigDifference(NamedTuple):
    """A difference between runs.

    Attributes:
        kind: the kind of the difference.
        name: a key of the configuration, a package, or a file.
        values: the value in each run, None for a run without a value.
    """

    kind: Kind
    name: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        metric: the full name of the metric.
        value: the last value of evaluations; for training, the mean of the last `LAST_STEPS` values; NaN without any.
        step: the step of the last value.
        low, high: the interval of `value`; None if unknown.
        count: the number of episodes or steps averaged; None if unknown.
        basis: the source of the interval, in words; empty without an interval.
        left_out: the number of episodes or answers that the evaluation lacks.
    """

    metric: str
    value: float
    step: int
    low: float | None = None
    high: float | None = None
    count: int | None = None
    basis: str = ""
    left_out: int = 0


class ResultGap(NamedTuple):
    """The difference of two results, second minus first.

    Attributes:
        gap: the difference.
        low, high: the interval of the gap; None if the noise is unknown.
        basis: the source of the interval, in words.
    """

    gap: float
    low: float | None
    high: float | None
    basis: str

    @property
    def larger_than_noise(self) -> bool | None:
        """Whether the interval excludes 0; None if the noise is unknown."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


# Parts of a provenance, and the kinds of their differences.
_PARTS: Final = {"code": Kind.CODE, "inputs": Kind.INPUTS, "versions": Kind.VERSIONS, "machine": Kind.MACHINE}
# Keys of a run that affect neither training nor evaluation.
_INCIDENTAL: Final = (
    "runner.logger",
    "runner.resume_dir",
    "runner.save_interval",
    "runner.snapshot_interval",
    "runner.keep_checkpoints",
    "runner.save_on_interrupt",
    "runner.trace",
    "runner.metrics_port",
    "runner.max_restarts",
    "runner.sample_interval",
    "actor.checkpoint_save_path",
)
# Training results are averaged over this many steps: a single step is too noisy.
LAST_STEPS: Final = 10
_FEWEST_STEPS: Final = 3


def differences(
    configs: Sequence[Mapping[str, Any]],
    provenances: Sequence[Provenance | None],
    earlier: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> list[ConfigDifference]:
    """Return all differences between runs, most important first.

    Args:
        configs: the resolved configuration of each run, as plain data.
        provenances: the provenance of each run, in the same order; a missing one (None) is not a difference.
        earlier: the configurations of each run before it was resumed, oldest first.
    """
    flat = [_flat(config) for config in configs]
    for now, before in zip(flat, earlier, strict=False):
        now.update(_changed([*map(_flat, before), dict(now)]))
    names = dict.fromkeys(name for config in flat for name in config if not _incidental(name))
    differences = [ConfigDifference(_kind(name), name, tuple(config.get(name) for config in flat)) for name in names]
    differences = [difference for difference in differences if len(set(difference.values)) > 1]
    for part, kind in _PARTS.items():
        parts: list[Mapping[str, str] | None] = [
            None if provenance is None else getattr(provenance, part) for provenance in provenances
        ]
        known = [values for values in parts if values is not None]
        for name in dict.fromkeys(name for values in known for name in values):
            # A run without provenance has no versions or code to compare.
            if len({values.get(name) for values in known}) > 1:
                of_runs = tuple(None if values is None else values.get(name) for values in parts)
                differences.append(ConfigDifference(kind, name, of_runs))
    # Evaluation keys that inherit from training keys are reported after them.
    leading = _leading_evaluations({difference.name: difference for difference in differences})
    order = list(Kind)

    def importance(difference: ConfigDifference) -> tuple[float, bool]:
        kind = Kind.EVALUATION if difference.name in leading else difference.kind
        # The algorithm comes before the evaluation protocol.
        algorithm = kind is Kind.CONFIG and difference.name.startswith("algorithm.")
        rank = order.index(Kind.EVALUATION) - 0.5 if algorithm else order.index(kind)
        return rank, not (algorithm and difference.name.endswith("_type"))

    return sorted(differences, key=importance)


def _changed(flat: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the values that changed when a run was resumed, as in `0.001, then 0.0001`, other than its length."""
    changed: dict[str, str] = {}
    for name in dict.fromkeys(name for values in flat for name in values):
        # Another version of rlinf may not have the key.
        texts = [text for text, _ in groupby(values[name] for values in flat if name in values)]
        if len(texts) > 1 and not any(name == key or name.startswith(f"{key}.") for key in FREE_KEYS):
            changed[name] = ", then ".join(texts)
    return changed


def _leading_evaluations(by_name: Mapping[str, ConfigDifference]) -> set[str]:
    """Return the training keys that differ in the same way as the corresponding evaluation keys.

    An evaluation inherits the keys that its section omits from training (`env.eval.task` from `env.train.task`), and
    a resolved configuration has both.
    """
    twins = {
        name: ".".join("train" if word == "eval" else word for word in name.split("."))
        for name, difference in by_name.items()
        if difference.kind is Kind.EVALUATION
    }
    return {
        twin
        for name, twin in twins.items()
        if name != twin and twin in by_name and by_name[twin].values == by_name[name].values
    }


def _flat(value: object, name: str = "") -> dict[str, str]:
    """Return every scalar as text by its dotted path."""
    if isinstance(value, Mapping) and value:
        values: dict[str, str] = {}
        for key, child in cast("Mapping[Any, Any]", value).items():
            values |= _flat(child, f"{name}.{key}" if name else str(key))
        return values
    if isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in cast("list[Any]", value)):
        values = {}
        for number, child in enumerate(cast("list[Any]", value)):
            values |= _flat(child, f"{name}[{number}]")
        return values
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a file may write 1 for 1.0
    text = "null" if value is None else str(cast("object", value))
    return {name: text.lower() if isinstance(value, bool) else text}


def _incidental(name: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in _INCIDENTAL)


def _kind(name: str) -> Kind:
    """Return the kind of a configuration key."""
    words = name.split(".")
    if name == "recipe":
        return Kind.RECIPE
    if words[-1] == "seed" or words[-1].endswith("_seed"):
        return Kind.SEEDS
    if any(word == "eval" or word.startswith(("val_", "eval_")) for word in words):
        return Kind.EVALUATION
    return Kind.PLACEMENT if words[0] == "cluster" else Kind.CONFIG


def result_of(metric: str, series: RunSeries) -> RunResult:
    """Return the result of a run in one metric, with its interval.

    An evaluation's interval is recorded with it (`<metric>_low`, `<metric>_high`); for a share of episodes it is else
    Wilson's interval for their number (`eval/episodes`). A training interval is Student's t for the mean of the last
    steps; it is only a hint, because steps are correlated.

    Args:
        metric: the full name of the metric, as in `eval/success_at_end`.
        series: the metrics of the run.
    """
    column = series.finite.get(metric)
    if column is None:
        return RunResult(metric, math.nan, 0)
    step = column.steps[-1]
    if metric.startswith("eval/"):
        # The file of a run may hold a step twice.
        last = (metrics for at, metrics in reversed(series.evaluations) if at == step)
        metrics = next(metrics for metrics in last if math.isfinite(metrics.get(metric, math.nan)))
        low, high, count = interval_of(metric, metrics)
        basis = "the last evaluation" if low is not None else ""
        left_out = metrics.get(f"{metric.rpartition('/')[0]}/left_out", 0.0)
        left_out = int(left_out) if math.isfinite(left_out) else 0
        return RunResult(metric, metrics[metric], step, low, high, count, basis, left_out)
    values = column.values[-LAST_STEPS:]
    center = mean(values)
    if len(values) < _FEWEST_STEPS:
        return RunResult(metric, center, step, count=len(values))
    half = t_quantile(len(values) - 1) * math.sqrt(_variance(values) / len(values))
    return RunResult(metric, center, step, center - half, center + half, len(values), f"the last {len(values)} steps")


def verdict(first: Sequence[RunResult], second: Sequence[RunResult]) -> ResultGap:
    """Return the gap between the results of two sets of runs, with its confidence interval.

    Runs of a set differ only in their seeds. With several runs in both sets, the interval is Welch's for the two means.
    Otherwise, and if the results within both sets are equal, it combines the intervals of the first run of each set
    (Newcombe, Statistics in Medicine 17, 1998, method 10), which ignores the variance between seeds.
    """
    ours, theirs = [result.value for result in first], [result.value for result in second]
    if min(len(ours), len(theirs)) > 1 and max(len(set(ours)), len(set(theirs))) > 1:
        return ResultGap(mean(theirs) - mean(ours), *_welch(ours, theirs), f"{len(ours)} and {len(theirs)} seeds")
    a, b = first[0], second[0]
    gap = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return ResultGap(gap, None, None, "a single value each; run several seeds to measure the noise")
    low = gap - math.hypot(b.value - b.low, a.high - a.value)
    high = gap + math.hypot(b.high - b.value, a.value - a.low)
    return ResultGap(gap, low, high, f"{a.basis} of one run each; other seeds may differ more")


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the difference of two means (Welch, Biometrika 34, 1947)."""
    parts = [_variance(values) / len(values) for values in (ours, theirs)]
    gap, error = mean(theirs) - mean(ours), math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
    )
    half = t_quantile(freedom) * error
    return gap - half, gap + half


def _variance(values: Sequence[float]) -> float:
    center = mean(values)
    return sum((value - center) ** 2 for value in values) / (len(values) - 1)


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, with the degrees of freedom rounded down to an integer.

    A table gives the quantile up to 30 degrees; above, the first terms of its expansion around the normal quantile
    (Abramowitz and Stegun, 26.7.5) are exact to 1e-4.
    """
    degrees = max(1, int(freedom))
    if degrees <= len(_T):
        return _T[degrees - 1]
    cube = _Z**3
    return _Z + (cube + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * cube + 3 * _Z) / (96 * degrees**2)
