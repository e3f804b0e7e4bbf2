"""The embodied loop in virtual time: against arithmetic by hand, against its own bounds, and against brute force."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.advice.embodied_flow import HOP, POLICY, STEP, UPDATE, VALUES, EmbodiedFlow, flow_of
from rlinf_core.advice.arrangements import Arrangement, DeviceGroup, DeviceSpan, candidates
from rlinf_core.advice.durations import Duration, Durations
from rlinf_core.advice.search import Flow, search
from rlinf_core.job.load import load_job

GPU = "gpu"
MODELS = {GPU: "m"}


def job_of(*overrides: str, envs: int = 64, chunks: int = 8) -> EmbodiedFlow:
    """An environment step of a chunk each, all samples of a step in one batch."""
    lengths = [f"env.train.total_num_envs={envs}", f"env.train.max_steps_per_rollout_epoch={chunks}"]
    sizes = [f"actor.global_batch_size={envs * chunks}", "actor.micro_batch_size=16", "algorithm.update_epoch=1"]
    once = [f"env.train.max_episode_steps={chunks}", "env.train.rollout_epoch=1", "runner.val_check_interval=-1"]
    job = load_job("laptop", [*lengths, *sizes, *once, "actor.model.num_action_chunks=1", *overrides])
    config: Any = job.config
    assert config is not None, [str(finding.message) for finding in job.diagnostics]
    return flow_of(config)


JOB, SHORT = job_of(), job_of("actor.micro_batch_size=1", envs=6, chunks=2)


Line = tuple[float, float]


def timed(env: Line, policy: Line, micro: Line, hop: float = 0.0, job: EmbodiedFlow = JOB) -> Flow:
    lines = {STEP: env, POLICY: policy, VALUES: policy, UPDATE: micro}
    phases = {phase: {"m": Duration(*line)} for phase, line in lines.items()}
    return job.flow(Durations({**phases, HOP: {"": Duration(hop)}}), MODELS)


def arranged(env: tuple[int, int], rollout: tuple[int, int], actor: tuple[int, int], stages: int, ahead: int) -> Any:
    names = zip(("env", "rollout", "actor"), (env, rollout, actor), strict=True)
    return Arrangement(tuple((name, DeviceSpan(GPU, *seats)) for name, seats in names), stages, ahead)


# Of 64 environments and 8 chunks: a step 0.4, the policy 0.2 and values once, 512 samples at 1 / 160 each.
PLAIN = ((0.4, 0.0), (0.2, 0.0), (0.0, 1 / 160))


@pytest.mark.parametrize(
    ("env", "rollout", "actor", "stages", "ahead", "seconds"),
    [
        # One after the other: 8 x (0.4 + 0.2) + 0.2, then 32 x 0.1.
        ((0, 1), (1, 1), (2, 1), 1, 0, 8.2),
        # Two actors have 256 samples each.
        ((0, 1), (1, 1), (2, 2), 1, 0, 6.6),
        # Training behind the next rollout, which is longer.
        ((0, 1), (1, 1), (2, 1), 1, 1, 5.0),
        # All on one accelerator: everything adds up, also where rollouts run ahead.
        ((0, 1), (0, 1), (0, 1), 1, 1, 8.2),
        # Two stages of one simulator: it is never idle but for the first actions.
        ((0, 1), (1, 1), (2, 1), 2, 0, 0.2 + 16 * 0.4 + 0.2 + 3.2),
    ],
)
def test_a_step_takes_what_arithmetic_says(
    env: Any, rollout: Any, actor: Any, stages: int, ahead: int, seconds: float
) -> None:
    step = timed(*PLAIN).simulate(arranged(env, rollout, actor, stages, ahead))
    assert step.seconds == pytest.approx(seconds)


def test_messages_take_their_time_once_a_direction() -> None:
    where = arranged((0, 1), (1, 1), (2, 1), 1, 0)
    assert timed(*PLAIN, hop=0.01).simulate(where).seconds == pytest.approx(8.2 + 0.01 * (2 * 8 + 1))


def test_a_mean_hides_what_waits_for_the_slowest_of_several() -> None:
    spread = (1.0,) * 9 + (5.0,)
    phases = {phase: {"m": Duration(0.2)} for phase in (POLICY, VALUES, UPDATE)}
    flow = JOB.flow(Durations({**phases, STEP: {"m": Duration(0.4, spread=spread)}}), MODELS)
    one, four = (flow.simulate(arranged((0, envs), (4, 1), (5, 1), 1, 0)).seconds for envs in (1, 4))
    assert flow.bound(arranged((0, 4), (4, 1), (5, 1), 1, 0)) < one < four


def test_many_alike_processes_are_simulated_as_one_block() -> None:
    job = job_of(envs=1024)
    flow = job.flow(Durations({phase: {"m": Duration(0.1, 0.01)} for phase in (STEP, POLICY, UPDATE)}), MODELS)
    many = arranged((0, 64), (64, 64), (128, 64), 1, 0)
    assert flow.simulate(many).seconds == pytest.approx(flow.bound(many))


line = st.tuples(st.floats(0.01, 0.5), st.floats(0.0, 0.02))
ranges = st.sampled_from([(first, count) for first in range(4) for count in range(1, 5 - first)])


@settings(max_examples=60, deadline=None)
@given(line, line, line, st.floats(0, 0.02), ranges, ranges, ranges, st.sampled_from([1, 2]), st.integers(0, 2))
def test_no_simulation_is_below_its_bound(
    env: Any, policy: Any, micro: Any, hop: float, e: Any, r: Any, a: Any, stages: int, ahead: int
) -> None:
    where = arranged(e, r, a, stages, ahead)
    if JOB.legal(where):
        flow = timed(env, policy, micro, hop)
        assert flow.bound(where) <= flow.simulate(where).seconds * (1 + 1e-9)


@settings(max_examples=2, deadline=None)
@given(line, line, line)
def test_the_search_finds_what_brute_force_finds(env: Any, policy: Any, micro: Any) -> None:
    flow, kind = timed(env, policy, micro, job=SHORT), DeviceGroup(GPU, 3, 3)
    spans = [(first, count) for first in range(3) for count in range(1, 4 - first)]
    every = [arranged(*spans, 1, ahead) for *spans, ahead in product(spans, spans, spans, (0, 1))]
    fastest = min(flow.simulate(where).seconds for where in every if SHORT.legal(where))
    names = dict.fromkeys(SHORT.components, (kind,))
    result = search(flow, candidates(flow, names, (1,), (0, 1), SHORT.legal))
    assert result.proven
    assert result.best[0].step.seconds == pytest.approx(fastest)
    assert result.simulated < result.judged


def test_off_policy_updates_follow_the_steps_taken() -> None:
    learns = ("algorithm.loss_type=sac", "actor.model.model_type=squashed_policy")
    sizes = ("algorithm.update_to_data=0.5", "actor.global_batch_size=64", "env.train.total_num_envs=8")
    steps = ("env.train.max_steps_per_rollout_epoch=16", "env.train.max_episode_steps=16")
    config: Any = load_job("laptop", [*learns, *sizes, *steps]).config
    # 8 environments x 16 steps x 0.5; the actors share each batch.
    assert [flow_of(config).training(actors) for actors in (1, 2)] == [[(UPDATE, 64, 64)], [(UPDATE, 32, 64)]]


@pytest.mark.parametrize(("seconds", "shares"), [(0.02, True), (0.5, False)])
def test_the_best_mode_flips_with_the_cost_of_the_simulator(seconds: float, *, shares: bool) -> None:
    job = job_of(envs=32)
    acting = {phase: {"m": Duration(0.05, 0.2 / 32)} for phase in (POLICY, VALUES)}
    others = {UPDATE: {"m": Duration(0.0, 4 / 256)}, STEP: {"": Duration(0.0, seconds / 32)}}
    flow, kind = job.flow(Durations({**acting, **others}), MODELS), DeviceGroup(GPU, 2, 2)
    # Two processes step environments beside two accelerators.
    where = {"env": DeviceSpan(None, 0, 2), "rollout": (kind,), "actor": (kind,)}
    best = search(flow, candidates(flow, where, (1, 2), (0, 1), job.legal)).best[0].arrangement
    assert best.of("rollout").overlaps(best.of("actor")) == shares
    assert shares or (best.stages, best.staleness) == (2, 1)
