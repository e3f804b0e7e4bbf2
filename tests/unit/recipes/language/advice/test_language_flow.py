"""The loop of answers in virtual time: against arithmetic by hand, and against its own bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.language.advice.language_flow import ANSWER, LAG, PAUSE, SCORE, STEP, TURNS, UPDATE, LanguageFlow, flow_of
from rlinf_core import RLinfError
from rlinf_core.advice.arrangements import Arrangement, DeviceSpan
from rlinf_core.advice.durations import CallRow, Duration, Durations
from rlinf_core.advice.search import Flow
from rlinf_core.job.load import load_job

GPU = "gpu"
MODELS = {GPU: "m"}


def job_of(*overrides: str) -> LanguageFlow:
    """Four prompts of two answers each."""
    sizes = ["data.rollout_batch_size=4", "algorithm.group_size=2", "algorithm.n_minibatches=1"]
    config: Any = load_job("math_laptop", [*sizes, *overrides]).config
    return flow_of(config)


JOB = job_of()
SOME: dict[str, list[tuple[float, int]]] = {ANSWER: [(10.0, 3), (40.0, 1)]}


def timed(
    step: tuple[float, float],
    update: tuple[float, float],
    score: float = 0.0,
    sizes: Any = None,
    lag: float = 0.0,
    job: LanguageFlow = JOB,
) -> Flow:
    phases = {STEP: {"m": Duration(*step)}, UPDATE: {"m": Duration(*update)}, SCORE: {"": Duration(score)}}
    phases |= {LAG: {"": Duration(lag)}}
    return job.flow(Durations(phases), MODELS, sizes or {ANSWER: [(10.0, 1)]})


def arranged(rollout: tuple[int, int], actor: tuple[int, int], ahead: int) -> Arrangement:
    return Arrangement((("rollout", DeviceSpan(GPU, *rollout)), ("actor", DeviceSpan(GPU, *actor))), 1, ahead)


@pytest.mark.parametrize(
    ("rollout", "actor", "ahead", "seconds"),
    [
        # Ten steps of eight answers, 0.1 + 8 x 0.01 each; then 80 tokens at 0.05.
        ((0, 1), (1, 1), 0, 1.8 + 4.0),
        # Two engines have four answers each; two actors 40 tokens.
        ((0, 2), (0, 2), 0, 1.4 + 2.0),
        # Behind the training, which is longer.
        ((0, 1), (1, 1), 1, 4.0),
    ],
)
def test_a_step_takes_what_arithmetic_says(rollout: Any, actor: Any, ahead: int, seconds: float) -> None:
    flow = timed((0.1, 0.01), (0.0, 0.05))
    assert flow.simulate(arranged(rollout, actor, ahead)).seconds == pytest.approx(seconds)


def test_new_weights_wait_for_answers_that_must_not_continue() -> None:
    drained = timed((0.1, 0.01), (0.0, 0.0), job=job_of("runner.partial_rollout=false"))
    mixed, where = timed((0.1, 0.01), (0.0, 0.0)), arranged((0, 1), (1, 1), 1)
    # Ten steps of eight answers; else of those of two steps at once.
    assert drained.simulate(where).seconds == pytest.approx(1.8)
    assert mixed.simulate(where).seconds == pytest.approx(1.3, rel=0.05)


def test_the_longest_answer_holds_a_step_up() -> None:
    even, uneven = (timed((0.1, 0.0), (0.0, 0.0), sizes={ANSWER: sizes}) for sizes in ([(16.0, 1)], SOME[ANSWER]))
    where = arranged((0, 1), (1, 1), 0)
    assert even.simulate(where).seconds == pytest.approx(1.6)
    assert uneven.simulate(where).seconds > 2.5


line = st.tuples(st.floats(0.01, 0.2), st.floats(0.0, 0.01))
spans = st.sampled_from([(first, size) for first in range(3) for size in range(1, 4 - first)])


@settings(max_examples=15, deadline=None)
@given(line, line, st.floats(0, 0.05), spans, spans, st.integers(0, 2), st.floats(0, 0.05))
def test_no_simulation_is_below_its_bound(
    step: Any, update: Any, score: float, r: Any, a: Any, ahead: int, lag: float
) -> None:
    flow, where = timed(step, update, score, SOME, lag), arranged(r, a, ahead)
    assert flow.bound(where) <= flow.simulate(where).seconds * (1 + 1e-9)


def test_without_lengths_of_answers_there_is_no_advice() -> None:
    with pytest.raises(RLinfError, match="no lengths of answers"):
        JOB.flow(Durations({}), MODELS, {})


def test_components_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(RLinfError, match="component `critic`"):
        job_of("cluster.component_placement.critic={node_group: node, placement: 0}", "algorithm.adv_type=gae")


@pytest.mark.parametrize("trained", [40, 400])
def test_tokens_of_an_update_are_counted_as_drawn_ones(trained: float) -> None:
    """Of 100 drawn tokens 40 are learned from; or those of tools are among 400."""
    rows = [CallRow("actor", UPDATE, trained, "m", 4, 2.0), CallRow("rollout", STEP, 8.0, "m", 9, 0.1)]
    run: Any = SimpleNamespace(rows=rows, sizes={ANSWER: [(10.0, 40)]})
    update, step = JOB.calls(run)
    assert update == rows[0]._replace(rows=pytest.approx(100.0))
    assert step == rows[1]
    # A run that recorded no lengths says nothing of it.
    assert JOB.calls(SimpleNamespace(rows=rows, sizes={})) == rows  # type: ignore[arg-type]


def test_a_conversation_waits_for_its_tools() -> None:
    constants = {TURNS: {"": Duration(2.0)}, PAUSE: {"": Duration(3.0)}}
    phases = {STEP: {"m": Duration(0.1)}, UPDATE: {"m": Duration(0.0)}, **constants}
    flow = JOB.flow(Durations(phases), MODELS, {ANSWER: [(10.0, 1)]})
    where = arranged((0, 1), (1, 1), 0)
    # Twice five tokens, and a tool in between.
    assert flow.simulate(where).seconds == pytest.approx(2 * 0.5 + 3.0, rel=0.05)
    assert flow.bound(where) <= 4.0 + 1e-9


@pytest.mark.parametrize("turns", [1, 2])
def test_a_run_is_predicted_as_long_as_it_took(turns: int) -> None:
    """Engines do more than their steps: what a rollout took longer is found again, and grows with the tokens."""
    where = arranged((0, 1), (1, 1), 0)
    phases = {"time/generate_rollouts": 6.0, "time/actor_training": 1.0, "time/step": 7.5, "time/sync_weights": 0.25}
    tools = {"agent/turns": 2.0, "agent/tool_seconds/search": 1.0} if turns > 1 else {}
    sizes = {ANSWER: [(10.0, 1)]}
    run: Any = SimpleNamespace(arrangement=where, models=MODELS, phases={**phases, **tools}, sizes=sizes, rows=[])
    calls = {STEP: {"m": Duration(0.1, 0.01)}, UPDATE: {"m": Duration(1.0)}, SCORE: {"": Duration(0.05)}}
    durations = Durations({**calls, **Durations.of(JOB.constants(run, Durations(calls))).phases})
    predicted, longer = (
        JOB.flow(durations, MODELS, {ANSWER: [(tokens, 1)]}).simulate(where).seconds for tokens in (10.0, 20.0)
    )
    assert predicted == pytest.approx(7.5, rel=0.01)
    assert longer > 7.5 + 0.8 * (6.0 - 1.0 * (turns - 1))
