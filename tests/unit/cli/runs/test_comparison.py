"""Metrics and provenance of runs, compared."""

from __future__ import annotations

import math
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from rlinf_cli.report.content import result_rows
from rlinf_cli.runs.documents import ENVIRONMENT, Provenance, collect, read_provenance, write_provenance
from rlinf_cli.runs.metric_columns import (
    MOST_POINTS,
    Band,
    MetricColumn,
    Units,
    evaluated,
    series_of,
    tail_of,
    waits_of,
)
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
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import CallsOfSize, Metrics, MetricsWriter, metrics_in
from rlinf_core.runners.storage.run_state import RunState
from tests.unit.cli.typed import text_file

CONFIG = {
    "recipe": "embodied",
    "cluster": {"num_nodes": 1, "node_groups": [{"label": "a", "node_ranks": 0}]},
    "actor": {"seed": 1, "optim": {"lr": 0.001}, "checkpoint_save_path": None},
    "env": {"train": {"task": "pick", "seed": 1}, "eval": {"total_num_envs": 64}},
    "runner": {"max_steps": 100, "logger": {"log_path": "runs", "logger_backends": ["tensorboard"]}},
}


def _result_of(metric: str, steps: Sequence[tuple[int, Mapping[str, float]]]) -> RunResult:
    return result_of(metric, series_of(Metrics(step, float(step), metrics) for step, metrics in steps))


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


def test_one_number_written_in_two_ways_is_no_difference() -> None:
    assert differences([{"lr": 1}, {"lr": 1.0}], [None, None]) == []
    assert len(differences([{"lr": 1}, {"lr": True}], [None, None])) == 1


def test_missing_provenance_is_equal_and_a_package_differs() -> None:
    known = Provenance({"torch": "2.13.0"}, {}, {}, {})
    assert differences([CONFIG, CONFIG, CONFIG], [known, None, known]) == []
    lacking = ConfigDifference(Kind.VERSIONS, "torch", ("2.13.0", None))
    assert differences([CONFIG, CONFIG], [known, Provenance()]) == [lacking]


@pytest.mark.parametrize("count", ["episodes", "answers"])
def test_what_an_evaluation_left_out_stands_with_its_number(count: str) -> None:
    metrics = {"eval/success_at_end": 11 / 15, f"eval/{count}": 15.0, "eval/left_out": 1.0}
    assert result_text(_result_of("eval/success_at_end", [(1, metrics)])).endswith(" of 15, 1 left out")
    assert "left out" not in result_text(_result_of("eval/success_at_end", [(1, {**metrics, "eval/left_out": 0.0})]))


def test_results_of_evaluations_and_of_training() -> None:
    steps = [(step, {"rollout/reward": 0.1 * step, "eval/success_at_end": math.nan}) for step in range(1, 21)]
    steps[9][1].update({"eval/success_at_end": 0.5, "eval/episodes": 64.0})

    success = _result_of("eval/success_at_end", steps)
    assert (success.value, success.step, success.count) == (0.5, 10, 64)
    # Wilson's interval of 32 of 64.
    assert (success.low, success.high) == (pytest.approx(0.3810, abs=1e-4), pytest.approx(0.6190, abs=1e-4))
    reward = _result_of("rollout/reward", steps)
    assert (reward.value, reward.step, reward.count) == (pytest.approx(1.55), 20, 10)
    # Student's with 9 degrees of freedom: 2.2622 times 0.30277 over the root of 10.
    assert reward.high == pytest.approx(1.55 + 2.2622 * 0.302765 / math.sqrt(10), abs=1e-4)
    assert math.isnan(_result_of("nothing", steps).value)
    assert _result_of("eval/success_at_end", [steps[9], (10, {"eval/return": 1.0})]).value == 0.5


def test_the_noise_between_seeds_is_that_of_welch() -> None:
    def of(*values: float) -> list[RunResult]:
        return [RunResult("m", value, 1) for value in values]

    # By hand: variances 0.01 and 0.0025 of three each, and 2.94 degrees of freedom, taken as 2.
    result = verdict(of(0.5, 0.6, 0.7), of(0.85, 0.9, 0.95))
    half = 4.3027 * math.sqrt(0.0125 / 3)
    assert (result.gap, result.low, result.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert result.larger_than_noise is True
    assert verdict(of(0.5, 0.9), of(0.6, 0.85)).larger_than_noise is False
    # Equal results, as of one seed twice, show no noise.
    assert verdict(of(0.5, 0.5), of(0.6, 0.6)).larger_than_noise is None


def test_single_runs_are_judged_by_their_own_intervals() -> None:
    def evaluated(share: float, episodes: int) -> list[RunResult]:
        return [_result_of("eval/success_once", [(1, {"eval/success_once": share, "eval/episodes": float(episodes)})])]

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


@pytest.mark.parametrize("count", [1, 7, 2600, 100_000])
def test_column_of_any_length_is_a_few_bands_with_its_peaks(count: int) -> None:
    values = [math.sin(step / 50) for step in range(count)]
    values[count // 2], values[count // 3] = 9.0, -9.0
    column = MetricColumn(list(range(count)), values)
    bands = column.bands()
    assert len(bands) == min(count, MOST_POINTS)
    assert (max(band.high or 0 for band in bands), min(band.low or 0 for band in bands)) == (max(values), min(values))
    assert [band.step for band in bands] == sorted(band.step for band in bands)
    assert math.isclose(column.mean(), sum(values) / count, abs_tol=1e-12)


def test_metrics_become_columns_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.log(1, {"env/return": 1.0, "train/loss": math.nan, "time/step": 2.0})
        metrics.log(2, {"env/return": 3.0, "time/step": 1.0, "eval/success_once": 0.5, "eval/episodes": 64.0})
    path.write_text(path.read_text() + '{"torn')
    series = series_of(metrics_in(path))
    assert list(series.steps) == [1, 2]
    assert [(band.step, band.mean) for band in series.finite["env/return"].bands()] == [(1, 1.0), (2, 3.0)]
    # What is not finite is kept, and left out of charts.
    assert "train/loss" not in series.finite
    assert math.isnan(series.columns["train/loss"].values[0])
    (point,) = evaluated("eval/success_once", series.evaluations)
    assert point.low is not None
    assert point.high is not None
    assert point.step == 2
    assert 0.37 < point.low < 0.39
    assert point.low + point.high == 1.0


def test_values_at_the_end_lie_within_bounds_since_a_step() -> None:
    column = MetricColumn([1, 2, 4, 5], [0.0, 3.0, 1.0, 0.5])
    assert (column.since(0.0, 1.0), column.since(0.0, 3.0), column.since(2.0, 3.0)) == (4, 1, None)
    assert MetricColumn([1, 2], [1.0, math.nan]).since(0.0, 2.0) is None
    assert list(column.last(2).values) == [1.0, 0.5]
    chosen = column.where(lambda step, value: step > 1 and value > 0.5)
    assert (list(chosen.steps), list(chosen.values)) == ([2, 4], [3.0, 1.0])


def test_pace_leaves_out_the_time_before_a_resumption() -> None:
    lines = [Metrics(step, 1e6 * step, {"time/step": 8.0}) for step in (1, 2, 5)]
    lines[-1] = Metrics(5, 10.0, {"time/step": 8.0, "time/evaluate": 6.0})
    assert (series_of(lines).pace, series_of([Metrics(1, 20.0, {})]).pace) == (pytest.approx(0.1), None)


def test_bands_of_a_short_column_have_one_value_each() -> None:
    assert MetricColumn([1, 2], [0.5, 1.5]).bands() == [Band(1, 0.5, 0.5, 0.5), Band(2, 1.5, 1.5, 1.5)]
    assert MetricColumn().bands() == []


def test_report_does_not_hide_a_last_value_that_is_not_finite() -> None:
    series = series_of([Metrics(1, 0.0, {"env/return": 4.0}), Metrics(2, 1.0, {"env/return": math.nan})])
    state = RunState(recipe="embodied", experiment="a", step=2)
    assert ("last training step", "return nan") in result_rows(state, series)


def test_value_whose_square_overflows_counts_as_infinite() -> None:
    steps = [(step, {"env/return": 1e308 if step == 7 else 2.0}) for step in range(1, 10)]
    result = _result_of("env/return", steps)
    assert (result.value, result.low, result.high, result.count) == (2.0, 2.0, 2.0, 8)


def test_intervals_that_were_written_are_used() -> None:
    metrics = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.7}
    assert evaluated("eval/pass@1", [(3, metrics), (4, {})]) == [(3, 0.5, 0.4, 0.7)]
    result = _result_of("eval/pass@1", [(3, metrics)])
    assert (result.low, result.high) == (0.4, 0.7)


@pytest.mark.parametrize("broken", ["eval/pass@1_low", "eval/pass@1_high", "eval/episodes", "eval/left_out"])
def test_number_that_is_not_finite_is_no_interval_and_no_count(broken: str) -> None:
    metrics = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.7, broken: math.nan}
    result = _result_of("eval/pass@1", [(3, metrics)])
    assert not {math.isnan(value) for value in (result.low, result.high, result.count) if value is not None} - {False}
    assert (result.value, result.left_out) == (0.5, 0)
    assert _result_of("eval/success_steps", [(3, {"eval/success_steps": 7.5, "eval/episodes": 4.0})]).low is None


def test_places_on_an_axis_add_up_what_steps_counted() -> None:
    lines = [Metrics(1, 0.0, {"env/steps": 512.0}), Metrics(2, 0.0, {"a": 1.0}), Metrics(3, 0.0, {"env/steps": 256.0})]
    series = series_of(lines)
    assert XAxis.ENV_STEPS.of(series) == {1: 512.0, 2: 512.0, 3: 768.0}
    assert XAxis.STEP.of(series) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_code_and_inputs_are_told_apart_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_lab"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    data = text_file(tmp_path / "sums.jsonl", "1+1=\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def taken() -> Provenance:
        return collect(packages=["my_lab"], inputs=[data, package, tmp_path / "nothing"])

    before = taken()
    assert taken() == before
    assert set(before.inputs) == {str(data), str(package)}
    data.write_text("2+2=\n")
    assert taken().inputs[str(data)] != before.inputs[str(data)]
    (package / "__init__.py").write_text("x = 2\n")
    after = taken()
    assert after.code["my_lab"] != before.code["my_lab"]
    assert after.inputs[str(package)] != before.inputs[str(package)]


def test_a_large_file_is_told_apart_by_its_size_and_its_ends(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytes(3 << 20)
    digests: set[str] = set()
    for changed in (content, b"x" + content[1:], content[:-1] + b"x", content + b"x"):
        file.write_bytes(changed)
        digests.add(collect(packages=[], inputs=[file]).inputs[str(file)])
    assert len(digests) == 4


def test_the_working_folders_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in collect(packages=[]).code

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    git("init")
    Path("train.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "Begin")
    clean = collect(packages=[]).code
    assert (len(clean["commit"]), clean["uncommitted"]) == (40, "")
    Path("train.py").write_text("2\n")
    assert collect(packages=[]).code["uncommitted"]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "rlinf.environment/9"}', '{"schema": "rlinf.environment/1"}'])
def test_provenance_is_kept_and_a_broken_one_refused_by_name(tmp_path: Path, text: str) -> None:
    assert read_provenance(tmp_path) is None
    collected = collect(packages=["rlinf_core"])
    assert collected.versions["torch"] == version("torch")
    write_provenance(tmp_path, collected)
    assert read_provenance(tmp_path) == collected
    (tmp_path / ENVIRONMENT).write_text(text)
    with pytest.raises(RunError, match="the provenance of a run cannot be read"):
        read_provenance(tmp_path)


def columns(**values: float) -> Mapping[str, MetricColumn]:
    """Ten steps, each with these values; `__` stands for a slash."""
    steps = array("q", range(10))
    return {name.replace("__", "/"): MetricColumn(steps, array("d", [value] * 10)) for name, value in values.items()}


def calls(phase: str, sizes: Mapping[float, tuple[int, float]], processes: int = 1) -> list[CallsOfSize]:
    """Calls of a phase by rows: their number and seconds."""
    return [
        CallsOfSize(
            component="x", phase=phase, processes=processes, rows=rows, calls=number, seconds=seconds, quantiles=[]
        )
        for rows, (number, seconds) in sizes.items()
    ]


def shares(
    metrics: Mapping[str, MetricColumn], timed: Sequence[CallsOfSize] = (), units: Units | None = None
) -> list[tuple[str, str, float, bool]]:
    """Who waits for whom, how long, and whether that matters."""
    return [(one.who, one.whom, round(one.share, 3), one.matters) for one in waits_of(metrics, timed, units or {})]


EMBODIED = columns(
    time__step=10.0, time__env__wait=2.0, time__rollout__wait=0.5, speed__env_idle=0.6, speed__learner_idle=0.4
)
APART: Units = {"env": {(0, None)}, "rollout": {(0, 0)}, "actor": {(0, 1)}}
TOGETHER: Units = {"env": {(0, 0)}, "rollout": {(0, 0)}, "actor": {(0, 0), (0, 1)}}


def test_each_component_is_named_with_whom_it_waits_for() -> None:
    assert shares(EMBODIED, units=APART) == [
        ("env", "actor", 0.6, True),
        ("rollout", "actor", 0.6, True),
        ("actor", "rollout", 0.4, True),
        ("env", "rollout", 0.2, True),
        ("rollout", "env", 0.05, False),
    ]


def test_who_takes_turns_on_the_same_hardware_is_not_idle() -> None:
    waits = waits_of(EMBODIED, [], TOGETHER)
    # The actor has an accelerator of its own.
    assert [(one.who, one.whom) for one in waits if one.matters] == [("actor", "rollout")]
    assert waits[-1].words == "rollout waits for env for 5 % of a step, in turns on the same hardware"


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ({}, [("rollout", "actor", 0.6, True), ("actor", "rollout", 0.4, True)]),
        # Nobody knows how long an engine has nothing to do while it is never asked to stop.
        ({"rollout__in_flight": 3.0}, [("actor", "rollout", 0.4, True)]),
    ],
)
def test_engines_wait_for_training_unless_they_run_ahead(
    further: Mapping[str, float], expected: list[tuple[str, str, float, bool]]
) -> None:
    assert shares(columns(time__step=10.0, time__generate_rollouts=4.0, **further)) == expected


@pytest.mark.parametrize(
    ("further", "whom"), [({}, "scores and messages"), ({"agent__turns": 3.0}, "tools, scores and messages")]
)
def test_engines_that_do_nothing_while_answers_are_due_wait(further: Mapping[str, float], whom: str) -> None:
    metrics = columns(time__step=10.0, time__generate_rollouts=4.0, **further)
    # Two engines, 40 s together in ten steps.
    timed = calls("engine/step", {8: (100, 30.0), 4: (50, 10.0)}, processes=2)
    assert ("rollout", whom, 0.2, True) in shares(metrics, timed, APART)
    # Without accelerators it leaves its processors to others meanwhile.
    assert ("rollout", whom, 0.2, False) in shares(metrics, timed, {"rollout": {(0, None)}})


ENGINE = {200.0: (10, 20.0), 100.0: (10, 10.0), 2.0: (40, 8.0), 1.0: (10, 2.0), 0.0: (500, 99.0)}
GENERATING = columns(time__step=10.0, time__generate_rollouts=5.0)


def test_the_longest_answers_are_named_with_what_they_cost() -> None:
    engine = calls("engine/step", ENGINE)
    answers = calls("answer", {10: (50, 0.0), 20: (48, 0.0), 300: (1, 0.0), 900: (1, 0.0)})
    tail = tail_of(GENERATING, [*answers, *engine])
    assert tail is not None
    assert tail.lengths == "tokens of an answer: median 10, p99 300, longest 900"
    assert tail.cost == "the longest 1 % of answers take 25 % of generation, 12 % of a step"
    assert tail.matters
    # One that a step hardly waits for does not matter.
    tail = tail_of(columns(time__step=10.0, time__generate_rollouts=2.0), [*answers, *engine])
    assert tail is not None
    assert not tail.matters
    # An evaluation of more answers does not set the number, and few have no percentile.
    evaluation = calls("engine/step", {**ENGINE, 900.0: (1, 5.0)})
    tail = tail_of(GENERATING, [*answers, *evaluation])
    assert tail is not None
    assert (tail.last, tail.of) == (2, 200)
    assert tail_of(GENERATING, [*calls("answer", {10: (99, 0.0)}), *engine]) is None
    assert waits_of({}, [], {}) == []
