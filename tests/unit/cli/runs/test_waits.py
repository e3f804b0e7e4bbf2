"""Who waits for whom in a step, by metrics, timed calls and places; and the tail of lengths of answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import pytest

from rlinf_cli.runs.metric_columns import MetricColumn, Units, tail_of, waits_of
from rlinf_core.runners.storage.profile import CallsOfSize


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


def test_a_run_without_steps_waits_for_nothing() -> None:
    assert waits_of({}, [], {}) == []


ENGINE = {200.0: (10, 20.0), 100.0: (10, 10.0), 2.0: (40, 8.0), 1.0: (10, 2.0), 0.0: (500, 99.0)}
GENERATING = columns(time__step=10.0, time__generate_rollouts=5.0)


def test_the_longest_answers_are_named_with_what_they_cost() -> None:
    timed = [
        *calls("answer", {10: (50, 0.0), 20: (48, 0.0), 300: (1, 0.0), 900: (1, 0.0)}),
        *calls("engine/step", ENGINE),
    ]
    tail = tail_of(GENERATING, timed)
    assert tail is not None
    assert tail.lengths == "tokens of an answer: median 10, p99 300, longest 900"
    assert tail.cost == "the longest 1 % of answers take 25 % of generation, 12 % of a step"
    assert tail.matters


def test_a_tail_that_a_step_hardly_waits_for_does_not_matter() -> None:
    timed = [*calls("answer", {10: (100, 0.0)}), *calls("engine/step", ENGINE)]
    tail = tail_of(columns(time__step=10.0, time__generate_rollouts=2.0), timed)
    assert tail is not None
    assert not tail.matters


def test_an_evaluation_of_more_answers_does_not_set_the_number() -> None:
    timed = [*calls("answer", {10: (100, 0.0)}), *calls("engine/step", {**ENGINE, 900.0: (1, 5.0)})]
    tail = tail_of(GENERATING, timed)
    assert tail is not None
    assert (tail.last, tail.of) == (2, 200)


def test_few_answers_have_no_percentile() -> None:
    timed = [*calls("answer", {10: (99, 0.0)}), *calls("engine/step", ENGINE)]
    assert tail_of(GENERATING, timed) is None
