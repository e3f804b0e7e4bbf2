"""What a person reads of a run: words, plain lines, and the block of the live view on 80 columns."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from rlinf_cli.job.findings import without_effect
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.terminal import block
from rlinf_cli.live.view import PlainView, line_of, summary_record, summary_text
from rlinf_core.runners import events
from tests.clock import Clock

FOLDER = Path("runs/embodied-20260102-030405")
STARTED = events.RunStarted(FOLDER, 1, 300, {"actor": 1, "rollout": 2, "env": 4})


class Lines:
    """A plain view whose clock is ours, and what it wrote."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.progress = RunProgress(self.clock)
        self.written: list[str] = []
        self.view = PlainView(self.progress, self.written.append)

    def tell(self, *happened: events.Event) -> None:
        for event in happened:
            self.progress.take(event)
            self.view.show(event)


@pytest.fixture
def lines() -> Lines:
    return Lines()


def running(*happened: events.Event) -> RunProgress:
    progress = RunProgress(Clock())
    for event in happened:
        progress.take(event)
    return progress


METRICS = {
    "env/success_at_end": 0.7234,
    "env/success_once": 0.9,
    "env/return": 12.345,
    "env/episode_len": 41.25,
    "train/actor/policy_loss": -0.01234,
    "train/actor/approx_kl": 0.00812,
    "train/actor/grad_norm": 0.5,
    "train/critic/value_loss": 1234.5,
    "time/step": 0.14,
    "time/actor_training": 0.1,
    "time/generate_rollouts": 0.04,
    "time/env/step": 0.0056,
    "time/env/wait": 0.014,
    "time/rollout/policy": 0.0084,
}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.92345, "0.923"),
        (17.24, "17.2"),
        (475.4, "475"),
        (-0.01, "-0.01"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (-1e308, "-1e+308"),
        (123456789.0, "123456789"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert labels.figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.4, "0:00"), (62, "1:02"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")),
        # Of a run of which the machine's clock was set back meanwhile.
        *((-5.0, "unknown"), (-0.1, "unknown")),
    ],
)
def test_clocks(seconds: float, text: str) -> None:
    assert labels.clock(seconds) == text


@pytest.mark.parametrize(("steps", "text"), [(7.123, "7.12 steps/s"), (0.05, "20 s/step")])
def test_a_slow_run_is_told_by_the_seconds_of_a_step(steps: float, text: str) -> None:
    assert labels.speed(steps) == text


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"success_at_end": 0.733, "episodes": 15, "left_out": 1}, "success 0.733 of 15, 1 left out"),
        ({"success_at_end": 0.733, "episodes": 15, "left_out": 0}, "success 0.733"),
        ({"success_at_end": 0.5, "episodes": 16, "env_errors": 5},
         "success 0.5 of 16, 5 failed by errors of the environment"),
        ({"pass@1": 0.5, "answers": 40, "left_out": 2.0}, "pass@1 0.5 of 40, 2 left out"),
        ({"pass@1": 0.0, "answers": 160, "cut_off": 160.0}, "pass@1 0 of 160, 160 cut off at the limit of tokens"),
        ({"loss": 1.5, "rows": 38, "prompts_skipped": 2}, "loss 1.5 of 38, 2 too long"),
    ],
)  # fmt: skip
def test_what_an_evaluation_lacks_stands_with_its_number(metrics: dict[str, float], text: str) -> None:
    named = {f"eval/{name}": value for name, value in metrics.items()}
    assert labels.figures_text(labels.headlines(named, "eval")) == text


SPEEDS = {"rollout/tokens_per_second": 1200.0, "train/actor/tokens_per_second": 900.0}
WHOLE = {"rollout/groups_kept": 1.0, "rollout/staleness_mean": 0.0}
STALE = {"rollout/groups_kept": 0.75, "rollout/staleness_mean": 1.2}
ANSWERS = {"rollout/reward": 0.5, "rollout/response_length": 12.0, "rollout/truncated": 0.1, **SPEEDS}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        # Success at the end is what success means; a reward is told where there is no return.
        (METRICS, "success 0.723, return 12.3, length 41.2"),
        ({"rollout/reward": 0.5, "env/return": 2.0}, "return 2"),
        ({"eval/return": 2.0}, ""),
        (ANSWERS | WHOLE, "reward 0.5, length 12, truncated 0.1, tokens/s 1200, trained tokens/s 900"),
        (
            ANSWERS | STALE,
            "reward 0.5, length 12, truncated 0.1, kept 0.75, staleness 1.2, tokens/s 1200, trained tokens/s 900",
        ),
    ],
)
def test_figures_of_a_step(metrics: dict[str, float], text: str) -> None:
    assert labels.figures_text(labels.headlines(metrics, "env", "rollout")) == text


def test_a_step_before_enough_episodes_has_their_number(lines: Lines) -> None:
    metrics = {"env/episodes": 3.0, "env/left_out": 1.0, "rollout/reward": 0.5}
    lines.tell(STARTED, events.StepFinished(1, metrics))
    assert "episodes ended 3, reward 0.5 " in lines.written[-1]
    assert "success" not in lines.written[-1]


def test_how_far_an_evaluation_is_breaks_the_silence(lines: Lines) -> None:
    evaluating = events.PhaseProgress(0, "12 of 64 answers, 3 timed out")
    lines.tell(STARTED, events.PhaseStarted(0, events.EVALUATE), evaluating)
    lines.clock.now += 31
    lines.view.break_silence()
    assert lines.written[1:] == ["after step 0, evaluating, 12 of 64 answers, 3 timed out, for 31 s"]


def test_plain_lines_of_steps_come_at_a_rate_that_can_be_read(lines: Lines) -> None:
    lines.tell(STARTED)
    for number in range(1, 201):
        lines.clock.now += 0.125
        lines.tell(events.StepFinished(number, METRICS))
    steps = [line for line in lines.written if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/300", "41/300", "81/300", "121/300", "161/300"]
    assert steps[1] == "step 41/300  success 0.723, return 12.3, length 41.2  8 steps/s  0:05, 0:32 left"


def test_the_last_step_has_its_line_and_that_of_an_evaluation(lines: Lines) -> None:
    lines.tell(STARTED)
    for number in (1, 2):
        lines.tell(events.StepFinished(number, METRICS))
    lines.tell(events.Evaluated(2, {"eval/success_at_end": 0.5}))
    for number in (3, 4):
        lines.tell(events.StepFinished(number, METRICS))
    lines.tell(events.RunFinished(4, METRICS, 3.0))
    heads = ["step 1/300", "step 2/300", "evaluated at", "step 4/300"]
    assert [" ".join(line.split()[:2]) for line in lines.written[1:5]] == heads


def test_what_happens_is_a_line_each(lines: Lines) -> None:
    lines.tell(events.PhaseStarted(0, events.LAUNCH), events.Waiting("actor: 1 process", 30.0))
    lines.clock.now += 4.2
    lines.tell(
        STARTED,
        events.Evaluated(50, {"eval/success_at_end": 0.5}),
        events.CheckpointSaved(100, FOLDER / "checkpoints" / "global_step_100"),
        events.RunRestarted(100, 1, 3, "rollout:0 died"),
        events.RunRestarted(0, 2, 3, "rollout:0 died"),
        events.ItemsResumed(100, {"restored": ["prompt 7 for step 101"], "done again": ["a", "b"]}),
        events.WorkersRelaunched(7, 3, 3, "env:1 died", 2.14, "the rollout of step 8"),
    )
    assert lines.written == [
        "waiting for actor: 1 process, at most 30 s",
        "started in 4.2 s: actor 1, rollout 2, env 4; steps 1 to 300",
        "evaluated at step 50: success 0.5",
        "saved global_step_100",
        "restart 1 of 3, back to step 100: rollout:0 died",
        "restart 2 of 3, from the beginning, without a checkpoint: rollout:0 died",
        "in flight at the checkpoint: 1 restored, 2 done again",
        "restart 3 of 3: env:1 died: started again in 2.1 s; done again: the rollout of step 8",
    ]


@pytest.mark.parametrize(
    ("first", "last", "resumed", "said"),
    [
        (1, 300, None, "steps 1 to 300"),
        (1, None, None, "from step 1"),
        (1, 0, None, "no steps left to train"),
        (4, 3, None, "no steps left to train"),
        (101, 300, "runs/x/global_step_100", "steps 101 to 300; continued from runs/x/global_step_100"),
    ],
)
def test_which_steps_a_run_is_about_to_do(
    lines: Lines, first: int, last: int | None, resumed: str | None, said: str
) -> None:
    folder = Path.cwd() / resumed if resumed else None
    lines.tell(STARTED._replace(first_step=first, last_step=last, resumed_from=folder))
    assert lines.written == [f"started in 0 ms: actor 1, rollout 2, env 4; {said}"]


def test_silence_is_broken(lines: Lines) -> None:
    lines.tell(events.Waiting("rollout: 2 processes", 120.0))
    lines.clock.now += 29
    lines.view.break_silence()
    assert len(lines.written) == 1
    lines.clock.now += 2
    lines.view.break_silence()
    assert lines.written[1:] == ["still waiting for rollout: 2 processes: 31 s of at most 120 s"]
    lines.tell(STARTED)
    lines.tell(events.StepFinished(7, {}))
    lines.tell(events.PhaseStarted(8, events.GENERATE_ROLLOUTS))
    lines.clock.now += 31
    lines.view.break_silence()
    assert lines.written[-1] == "after step 7, collecting rollouts for 31 s"


def test_an_end_that_takes_its_time_is_said_once(lines: Lines) -> None:
    lines.progress.end()
    lines.view.break_silence()
    lines.view.break_silence()
    assert lines.written == ["ending; press Ctrl-C again to end at once"]


def shown(progress: RunProgress, width: int = 80) -> list[str]:
    """Return the live view as it stands on a terminal, of 80 columns."""
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(block(progress, "embodied", str(FOLDER), width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_live_view_while_it_trains() -> None:
    clock = Clock()
    progress = RunProgress(clock)
    progress.take(STARTED)
    for number in range(1, 133):
        clock.now += 0.125
        progress.take(events.StepFinished(number, METRICS))
    progress.take(events.Evaluated(100, {"eval/success_at_end": 0.81, "eval/return": 14.2}))
    progress.take(events.CheckpointSaved(100, FOLDER / "checkpoints" / "global_step_100"))
    progress.take(events.PhaseStarted(133, events.ACTOR_TRAINING))
    assert shown(progress) == [
        "embodied  runs/embodied-20260102-030405  actor 1, rollout 2, env 4",
        "step      132/300  ━━━━━━━━━━━───────────── 44%  8 steps/s  0:16, 0:21 left",
        "train     success 0.723  return 12.3  length 41.2",
        "learn     policy loss -0.0123  value loss 1234  kl 0.00812  grad norm 0.5",
        "time      140 ms a step: training 71%  rollout 29%",
        "work      env: step 4%, wait 10%  rollout: policy 6%",
        "eval      success 0.81  return 14.2  at step 100",
        "saved     global_step_100",
        "now       training the actor, 0:00",
    ]


def test_the_live_view_is_never_wider_than_the_terminal() -> None:
    components = {f"component{i}": 10 for i in range(9)}
    died = "rollout:0 on node 17 (10.20.30.40) died: " + "because " * 20
    lines = shown(running(STARTED._replace(components=components), events.RunRestarted(0, 1, 3, died)))
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["embodied", "step", "restart", "now"]
    # Whoever reads it sees that something is missing.
    assert [line[-1] for line in (lines[0], lines[2])] == ["…", "…"]
    assert len(lines[2]) == 80


def test_the_live_view_of_a_narrow_terminal_is_one_line() -> None:
    progress = running(events.Waiting("rollout: 2 processes", 30.0))
    assert shown(progress, 79) == ["embodied  waiting for rollout: 2 processes, 0:00, at most 30 s"]
    assert shown(progress)[1] == "launch    waiting for rollout: 2 processes, 0:00, at most 30 s"
    progress = running(STARTED, events.StepFinished(1, METRICS))
    assert shown(progress, 79) == ["embodied  step 1/300  success 0.723, return 12.3, length 41.2  0:00"]
    assert [line[-1] for line in shown(progress, 30)] == ["…"]
    progress.end()
    assert shown(progress, 79) == ["embodied  ending; press Ctrl-C again to end at once"]
    assert shown(running(STARTED._replace(last_step=None), events.StepFinished(1, {})))[1] == "step      1  0:00"


def test_agents_are_told_of_by_turns_and_tools() -> None:
    metrics = {
        "agent/turns": 2.5,
        "agent/tool_calls": 2.0,
        "agent/tool_errors": 0.1,
        "agent/tool_timeouts": 0.1,
        "agent/tool_seconds/search": 1.0,
        "agent/tool_seconds/http": 2.0,
        "agent/seconds": 4.0,
    }
    output = "turns 2.5, tool errors 10%, waiting for tools 75%"
    assert labels.figures_text(labels.conversations(metrics)) == output
    assert labels.conversations({"agent/turns": 1.0, "agent/tool_calls": 0.0}) == [("turns", "1")]
    assert labels.conversations({"agent/tool_calls": 1.0})[-1] == ("waiting for tools", "0%")
    assert labels.conversations({"env/return": 1.0}) == []


def test_live_view_replaces_what_a_terminal_would_act_on() -> None:
    progress = running(STARTED, events.RunRestarted(0, 1, 3, "\x1b]0;x\x07 died \x9b2J [red]"))
    output = io.StringIO()
    Console(file=output, width=120, force_terminal=True, markup=False).print(
        block(progress, "embodied", "runs/\x1b[2Jx")
    )
    assert "died" in output.getvalue()
    assert "[red]" in output.getvalue()
    assert not any(part in output.getvalue() for part in ("\x1b]", "\x1b[2J", "\x07", "\x9b"))


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
    assert (progress.steps_per_second, progress.seconds_left) == (None, None)
    # News of the same wait does not start its clock again.
    news = events.Waiting("Ray: runs/a, step 9", again=True)
    progress.take(news)
    clock.now += 5
    assert (progress.waiting, progress.waiting_seconds) == (news, 7.0)
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
    progress.take(started(first=8, last=None))
    assert progress.step == 7
    for number in range(8, 100):
        clock.now += 10.0 if number < 70 else 0.1
        progress.take(step(number))
    assert progress.steps_per_second == pytest.approx(10.0)
    assert progress.seconds_left is None


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
    # That of a worker alone goes on where it was.
    relaunched = events.WorkersRelaunched(1, 1, 3, "env:0 died", 2.1)
    progress.take(events.Waiting("env: 1 process"))
    progress.take(relaunched)
    assert (progress.step, progress.restart, progress.waiting) == (7, relaunched, None)
    # `runner.max_restarts: {max: 3, within: 10m}` counts each as the first.
    assert progress.restarts == 2


def test_where_the_time_goes(progress: RunProgress) -> None:
    assert running(events.StepFinished(1, {})).shares() == (None, [])
    progress.take(started())
    progress.take(step(1, step=0.2, generate_rollouts=0.05, actor_training=0.15))
    progress.take(step(2, step=0.4, generate_rollouts=0.25, actor_training=0.15))
    whole, shares = progress.shares()
    assert whole == pytest.approx(0.3)
    assert [name for name, _ in shares] == ["generate_rollouts", "actor_training"]
    assert [share for _, share in shares] == pytest.approx([0.5, 0.5])


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
algorithm: {adv_type: grpo, loss_type: actor, group_size: 8,
  options: {normalize_advantages: false}}
actor: {optim: {value_lr: 1.0e-4}}
"""


def test_summary_names_keys_without_effect() -> None:
    unread = without_effect(load_with_lint("-", stdin=JOB, environ={}).diagnostics)
    text = summary_text(RunProgress(), Path("/runs/one"), unread=unread)
    (line,) = [line for line in text.splitlines() if line.strip().startswith("no effect")]
    assert line.endswith("algorithm.options.normalize_advantages (<stdin>:4), actor.optim.value_lr (<stdin>:5)")
    results = summary_record("finished", "embodied", Path("/runs/one"), unread=unread)["no_effect"]
    assert [result["key"] for result in results] == ["algorithm.options.normalize_advantages", "actor.optim.value_lr"]
    assert results[0]["place"] == "<stdin>:4:35"
    assert "no effect" not in summary_text(RunProgress(), Path("/runs/one"))
    assert summary_record("finished", "embodied", Path("/runs/one"))["no_effect"] == []


def test_summary_tells_why_a_run_did_not_learn() -> None:
    text = summary_text(RunProgress(), Path("/runs/one"), causes=[("learning", "the learning rate is 0")])
    assert "  learning    the learning rate is 0\n              `rlinf why /runs/one` shows the evidence" in text
