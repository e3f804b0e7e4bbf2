"""What differs between runs, and whether results differ by more than noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.runs.documents import Provenance
from rlinf_cli.runs.metric_comparison import (
    ConfigDifference,
    Kind,
    RunResult,
    differences,
    result_of,
    t_quantile,
    verdict,
)
from rlinf_cli.runs.run_comparison import result_text

CONFIG = {
    "recipe": "embodied",
    "cluster": {"num_nodes": 1, "node_groups": [{"label": "a", "node_ranks": 0}]},
    "actor": {"seed": 1, "optim": {"lr": 0.001}, "checkpoint_save_path": None},
    "env": {"train": {"task": "pick", "seed": 1}, "eval": {"total_num_envs": 64}},
    "runner": {"max_steps": 100, "logger": {"log_path": "runs", "logger_backends": ["tensorboard"]}},
}


def test_what_matters_most_comes_first() -> None:
    other = {
        **CONFIG,
        "cluster": {"num_nodes": 2, "node_groups": [{"label": "a", "node_ranks": "0-1"}]},
        "actor": {"seed": 2, "optim": {"lr": 0.01}, "checkpoint_save_path": "elsewhere"},
        "env": {"train": {"task": "pick", "seed": 1}, "eval": {"total_num_envs": 128}},
        "runner": {"max_steps": 100, "logger": {"log_path": "other", "logger_backends": []}},
    }
    ours = Provenance({"torch": "2.13.0"}, {"recipes": "aa"}, {"sums.jsonl": "11"}, {"host": "one"})
    theirs = Provenance({"torch": "2.12.0"}, {"recipes": "bb"}, {"sums.jsonl": "22"}, {"host": "two"})

    results = differences([CONFIG, other], [ours, theirs])

    assert [(result.kind, result.name) for result in results] == [
        (Kind.EVALUATION, "env.eval.total_num_envs"),
        (Kind.CONFIG, "actor.optim.lr"),
        (Kind.INPUTS, "sums.jsonl"),
        (Kind.CODE, "recipes"),
        (Kind.VERSIONS, "torch"),
        (Kind.PLACEMENT, "cluster.num_nodes"),
        (Kind.PLACEMENT, "cluster.node_groups[0].node_ranks"),
        (Kind.MACHINE, "host"),
        (Kind.SEEDS, "actor.seed"),
    ]
    assert results[1] == ConfigDifference(Kind.CONFIG, "actor.optim.lr", ("0.001", "0.01"))


def test_missing_provenance_is_equal_and_a_package_differs() -> None:
    known = Provenance({"torch": "2.13.0"}, {}, {}, {})

    assert differences([CONFIG, CONFIG], [known, None]) == []
    assert differences([CONFIG, CONFIG], [known, Provenance()]) == [
        ConfigDifference(Kind.VERSIONS, "torch", ("2.13.0", None))
    ]


@pytest.mark.parametrize("count", ["episodes", "answers"])
def test_what_an_evaluation_left_out_stands_with_its_number(count: str) -> None:
    metrics = {"eval/success_at_end": 11 / 15, f"eval/{count}": 15.0, "eval/left_out": 1.0}
    assert result_text(result_of("eval/success_at_end", [(1, metrics)])).endswith(" of 15, 1 left out")
    assert "left out" not in result_text(result_of("eval/success_at_end", [(1, {**metrics, "eval/left_out": 0.0})]))


@given(st.integers(2, 5))
def test_equal_runs_differ_in_nothing(count: int) -> None:
    assert differences([CONFIG] * count, [Provenance({"a": "1"})] * count) == []


def test_results_of_evaluations_and_of_training() -> None:
    steps = [(step, {"rollout/reward": 0.1 * step, "eval/success_at_end": math.nan}) for step in range(1, 21)]
    steps[9][1].update({"eval/success_at_end": 0.5, "eval/episodes": 64.0})

    success = result_of("eval/success_at_end", steps)
    assert (success.value, success.step, success.count) == (0.5, 10, 64)
    # Wilson's interval of 32 of 64.
    assert (success.low, success.high) == (pytest.approx(0.3810, abs=1e-4), pytest.approx(0.6190, abs=1e-4))
    reward = result_of("rollout/reward", steps)
    assert (reward.value, reward.step, reward.count) == (pytest.approx(1.55), 20, 10)
    # Student's with 9 degrees of freedom: 2.2622 times 0.30277 over the root of 10.
    assert reward.high == pytest.approx(1.55 + 2.2622 * 0.302765 / math.sqrt(10), abs=1e-4)
    assert math.isnan(result_of("nothing", steps).value)


def test_an_interval_that_was_written_is_taken() -> None:
    result = result_of("eval/pass@1", [(3, {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6})])

    assert (result.low, result.high) == (0.4, 0.6)


def test_the_noise_between_seeds_is_that_of_welch() -> None:
    def of(*values: float) -> list[RunResult]:
        return [RunResult("m", value, 1) for value in values]

    # By hand: variances 0.01 and 0.0025 of three each, and 2.94 degrees of freedom, taken as 2.
    result = verdict(of(0.5, 0.6, 0.7), of(0.85, 0.9, 0.95))
    half = 4.3027 * math.sqrt(0.0125 / 3)
    assert (result.gap, result.low, result.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert result.larger_than_noise is True
    assert verdict(of(0.5, 0.9), of(0.6, 0.85)).larger_than_noise is False


def test_single_runs_are_judged_by_their_own_intervals() -> None:
    def evaluated(share: float, episodes: int) -> list[RunResult]:
        return [result_of("eval/success_once", [(1, {"eval/success_once": share, "eval/episodes": float(episodes)})])]

    # Newcombe's example (1998, table II, row a): 56 of 70 against 48 of 80, method 10.
    result = verdict(evaluated(48 / 80, 80), evaluated(56 / 70, 70))
    assert (result.low, result.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
    assert verdict(evaluated(0.9, 64), evaluated(0.95, 64)).larger_than_noise is False
    assert verdict([RunResult("m", 1.0, 1)], [RunResult("m", 2.0, 1)]).larger_than_noise is None


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2.9, 4.3027), (30, 2.0423), (31, 2.0395), (120, 1.9799)]
)
def test_quantiles_of_student(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)
