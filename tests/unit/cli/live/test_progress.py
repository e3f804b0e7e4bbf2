"""The state of a run from its events, and its summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.job.findings import without_effect
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.run_summary import summary_record, summary_text
from rlinf_cli.live.view import line_of
from rlinf_core.runners import events
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> RunProgress:
    return RunProgress(clock)


def started(first: int = 1, last: int | None = 10) -> events.RunStarted:
    return events.RunStarted(Path("runs/x"), first, last, {"actor": 1, "env": 2})


def step(number: int, **times: float) -> events.StepFinished:
    return events.StepFinished(number, {"env/return": float(number), **{f"time/{k}": v for k, v in times.items()}})


def test_before_the_workers_are_there(progress: RunProgress, clock: Clock) -> None:
    clock.now += 3
    progress.take(events.Waiting("Ray", 30.0))
    clock.now += 2
    assert (progress.phase, progress.started, progress.step) == (events.LAUNCH, None, 0)
    assert (progress.launch_seconds, progress.waiting_seconds, progress.train_seconds) == (5.0, 2.0, 0.0)
    assert progress.steps_per_second is None
    assert progress.seconds_left is None


def test_news_of_the_same_wait_does_not_start_its_clock_again(progress: RunProgress, clock: Clock) -> None:
    progress.take(events.Waiting("accelerator 0 of node 0: runs/a, step 1"))
    clock.now += 60
    news = events.Waiting("accelerator 0 of node 0: runs/a, step 9", again=True)
    progress.take(news)
    clock.now += 5
    assert (progress.waiting, progress.waiting_seconds) == (news, 65.0)
    assert line_of(news, progress) is None


def test_speed_and_what_is_left(progress: RunProgress, clock: Clock) -> None:
    progress.take(started())
    assert (progress.step, progress.total, progress.waiting) == (0, 10, None)
    for number in range(1, 5):
        clock.now += 0.5
        progress.take(step(number))
    assert progress.steps_per_second == pytest.approx(2.0)
    assert progress.seconds_left == pytest.approx(3.0)
    assert progress.train_seconds == pytest.approx(2.0)
    assert progress.metrics["env/return"] == 4.0


def test_speed_follows_the_last_steps(progress: RunProgress, clock: Clock) -> None:
    progress.take(started(last=None))
    for number in range(1, 100):
        clock.now += 10.0 if number < 70 else 0.1
        progress.take(step(number))
    assert progress.steps_per_second == pytest.approx(10.0)
    assert progress.seconds_left is None


def test_a_resumed_run_counts_from_where_it_goes_on(progress: RunProgress) -> None:
    progress.take(started(first=8))
    assert progress.step == 7


def test_a_restart_goes_back_and_does_not_spoil_the_speed(progress: RunProgress, clock: Clock) -> None:
    progress.take(started())
    for number in range(1, 7):
        clock.now += 1
        progress.take(step(number))
    progress.take(events.RunRestarted(5, 1, 3, "rollout:0 died"))
    assert (progress.step, progress.phase) == (5, events.LAUNCH)
    clock.now += 60
    assert progress.steps_per_second is None
    for number in (6, 7):
        clock.now += 1
        progress.take(step(number))
    assert progress.steps_per_second == pytest.approx(1.0)


def test_a_relaunch_of_a_worker_goes_on_where_it_was(progress: RunProgress) -> None:
    progress.take(started())
    progress.take(step(1))
    relaunched = events.WorkersRelaunched(1, 1, 3, "env:0 died", 2.1)
    progress.take(events.Waiting("env: 1 process"))
    progress.take(relaunched)
    assert (progress.step, progress.restart, progress.waiting) == (1, relaunched, None)


def test_where_the_time_goes(progress: RunProgress) -> None:
    progress.take(started())
    progress.take(step(1, step=0.2, generate_rollouts=0.05, actor_training=0.15))
    progress.take(step(2, step=0.4, generate_rollouts=0.25, actor_training=0.15))
    whole, shares = progress.shares()
    assert whole == pytest.approx(0.3)
    assert [name for name, _ in shares] == ["generate_rollouts", "actor_training"]
    assert [share for _, share in shares] == pytest.approx([0.5, 0.5])


def test_where_the_time_goes_when_nobody_tells(progress: RunProgress) -> None:
    progress.take(started())
    progress.take(events.StepFinished(1, {}))
    assert progress.shares() == (None, [])


def test_the_end_stops_the_clock(progress: RunProgress, clock: Clock) -> None:
    progress.take(started())
    clock.now += 4
    # Ending the workers took a second of them.
    progress.take(events.RunFinished(10, {"eval/return": 3.0}, 3.0))
    clock.now += 4
    assert progress.train_seconds == pytest.approx(3.0)
    assert progress.metrics == {"eval/return": 3.0}


def test_a_rehearsal_shows_times_alone() -> None:
    progress = RunProgress(times_only=True)
    progress.take(events.StepFinished(1, {"env/success_once": 0.0, "env/return": 20.5, "time/step": 0.7}))
    progress.take(events.RunFinished(1, {"env/return": 20.5}, 0.7))
    assert progress.metrics == {"time/step": 0.7}


JOB = b"""\
recipe: embodied
cluster: {num_nodes: 1, component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}}
algorithm:
  adv_type: grpo
  loss_type: actor
  group_size: 8
  normalize_advantages: false
actor:
  optim: {value_lr: 1.0e-4}
"""


def test_keys_without_effect_are_named() -> None:
    unread = without_effect(load_with_lint("-", stdin=JOB, environ={}).diagnostics)
    text = summary_text(RunProgress(), Path("/runs/one"), unread=unread)
    (line,) = [line for line in text.splitlines() if line.strip().startswith("no effect")]
    assert line.endswith("algorithm.normalize_advantages (<stdin>:7), actor.optim.value_lr (<stdin>:9)")
    results = summary_record("finished", "embodied", Path("/runs/one"), unread=unread)["no_effect"]
    assert [result["key"] for result in results] == ["algorithm.normalize_advantages", "actor.optim.value_lr"]
    assert results[0]["place"] == "<stdin>:7:25"


def test_without_such_keys_there_is_no_line() -> None:
    assert "no effect" not in summary_text(RunProgress(), Path("/runs/one"))
    assert summary_record("finished", "embodied", Path("/runs/one"))["no_effect"] == []


def test_summary_tells_why_a_run_did_not_learn() -> None:
    text = summary_text(RunProgress(), Path("/runs/one"), causes=[("learning", "the learning rate is 0")])
    assert "  learning    the learning rate is 0\n              `rlinf why /runs/one` shows the evidence" in text
