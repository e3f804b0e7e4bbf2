"""What a person reads of a run: words, plain lines, and the block of the live view on 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import PlainView
from rlinf_core.runners import events
from tests.clock import Clock

FOLDER = Path("runs/embodied-20260102-030405")
STARTED = events.RunStarted(FOLDER, 1, 300, {"actor": 1, "rollout": 2, "env": 4})
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


class Lines:
    """A plain view whose clock is ours, and what it wrote."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.progress = RunProgress(self.clock)
        self.written: list[str] = []
        self.view = PlainView(self.progress, self.written.append)

    def tell(self, event: events.Event) -> None:
        self.progress.take(event)
        self.view.show(event)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.92345, "0.923"),
        (17.24, "17.2"),
        (475.4, "475"),
        (-0.01, "-0.01"),
        (float("nan"), "nan"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert labels.figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (62, "1:02"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_clocks(seconds: float, text: str) -> None:
    assert labels.clock(seconds) == text


def test_a_slow_run_is_told_by_the_seconds_of_a_step() -> None:
    assert labels.speed(7.123) == "7.12 steps/s"
    assert labels.speed(0.05) == "20 s/step"


def test_success_at_the_end_is_what_success_means() -> None:
    assert labels.figures_text(labels.headlines(METRICS, "env")) == "success 0.723, return 12.3, length 41.2"
    assert labels.headlines(METRICS, "eval") == []


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"eval/success_at_end": 0.733, "eval/episodes": 15, "eval/left_out": 1}, "success 0.733 of 15, 1 left out"),
        ({"eval/success_at_end": 0.733, "eval/episodes": 15, "eval/left_out": 0}, "success 0.733"),
        (
            {"eval/success_at_end": 0.5, "eval/episodes": 16, "eval/env_errors": 5},
            "success 0.5 of 16, 5 failed by errors of the environment",
        ),
        ({"eval/pass@1": 0.5, "eval/answers": 40, "eval/left_out": 2.0}, "pass@1 0.5 of 40, 2 left out"),
        (
            {"eval/pass@1": 0.0, "eval/answers": 160, "eval/cut_off": 160.0},
            "pass@1 0 of 160, 160 cut off at the limit of tokens",
        ),
        ({"eval/loss": 1.5, "eval/rows": 38, "eval/prompts_skipped": 2}, "loss 1.5 of 38, 2 too long"),
    ],
)
def test_what_an_evaluation_lacks_stands_with_its_number(metrics: dict[str, float], text: str) -> None:
    assert labels.figures_text(labels.headlines(metrics, "eval")) == text


def test_a_step_before_enough_episodes_has_their_number(lines: Lines) -> None:
    lines.tell(STARTED)
    lines.tell(events.StepFinished(1, {"env/episodes": 3.0, "env/left_out": 1.0, "rollout/reward": 0.5}))
    assert "episodes ended 3, reward 0.5 " in lines.written[-1]
    assert "success" not in lines.written[-1]


def test_how_far_an_evaluation_is_breaks_the_silence(lines: Lines) -> None:
    lines.tell(STARTED)
    lines.tell(events.PhaseStarted(0, events.EVALUATE))
    lines.tell(events.PhaseProgress(0, "12 of 64 answers, 3 timed out"))
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


def test_the_last_step_has_its_line(lines: Lines) -> None:
    lines.tell(STARTED)
    for number in (299, 300):
        lines.tell(events.StepFinished(number, METRICS))
    lines.tell(events.RunFinished(300, METRICS, 3.0))
    assert [line.split()[1] for line in lines.written if line.startswith("step ")] == ["299/300", "300/300"]


def test_the_step_of_an_evaluation_comes_before_it(lines: Lines) -> None:
    lines.tell(STARTED)
    for number in (1, 2):
        lines.tell(events.StepFinished(number, METRICS))
    lines.tell(events.Evaluated(2, {"eval/success_at_end": 0.5}))
    lines.tell(events.RunFinished(2, METRICS, 3.0))
    assert [line.split()[:2] for line in lines.written[1:]] == [
        ["step", "1/300"],
        ["step", "2/300"],
        ["evaluated", "at"],
    ]


def test_the_reward_is_told_where_there_is_no_return() -> None:
    assert labels.headlines({"rollout/reward": 0.5}, "env", "rollout") == [("reward", "0.5")]
    assert labels.headlines({"rollout/reward": 0.5, "env/return": 2.0}, "env", "rollout") == [("return", "2")]


def test_what_happens_is_a_line_each(lines: Lines) -> None:
    lines.tell(events.PhaseStarted(0, events.LAUNCH))
    lines.tell(events.Waiting("actor: 1 process", 30.0))
    lines.clock.now += 4.2
    lines.tell(STARTED)
    lines.tell(events.Evaluated(50, {"eval/success_at_end": 0.5}))
    lines.tell(events.CheckpointSaved(100, FOLDER / "checkpoints" / "global_step_100"))
    lines.tell(events.RunRestarted(100, 1, 3, "rollout:0 died"))
    lines.tell(events.RunRestarted(0, 2, 3, "rollout:0 died"))
    lines.tell(events.ItemsResumed(100, {"restored": ["prompt 7 for step 101"], "done again": ["a", "b"]}))
    lines.tell(events.WorkersRelaunched(7, 3, 3, "env:1 died", 2.14, "the rollout of step 8"))
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


def test_a_resumed_run_says_from_where(lines: Lines) -> None:
    lines.tell(STARTED._replace(first_step=101, resumed_from=FOLDER / "checkpoints" / "global_step_100"))
    (line,) = lines.written
    assert line.endswith(f"env 4; steps 101 to 300; continued from {FOLDER}/checkpoints/global_step_100")


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (1, 300, "steps 1 to 300"),
        (1, None, "from step 1"),
        (1, 0, "no steps left to train"),
        (4, 3, "no steps left to train"),
    ],
)
def test_which_steps_a_run_is_about_to_do(lines: Lines, first: int, last: int | None, said: str) -> None:
    lines.tell(STARTED._replace(first_step=first, last_step=last))
    assert lines.written == [f"started in 0 ms: actor 1, rollout 2, env 4; {said}"]


def test_checkpoint_path_is_printed_relative_to_the_folder(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines.tell(STARTED._replace(first_step=101, resumed_from=Path.cwd() / "runs" / "x" / "global_step_100"))
    assert lines.written[0].endswith("; continued from runs/x/global_step_100")


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
    from rich.console import Console

    from rlinf_cli.live.terminal import block

    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(block(progress, "embodied", str(FOLDER), width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_live_view_while_it_launches() -> None:
    clock = Clock()
    progress = RunProgress(clock)
    progress.take(events.Waiting("rollout: 2 processes", 30.0))
    clock.now += 4
    assert shown(progress) == [
        "embodied  runs/embodied-20260102-030405",
        "launch    waiting for rollout: 2 processes, 0:04, at most 30 s",
    ]


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
    progress = RunProgress(Clock())
    progress.take(STARTED._replace(components={f"component{i}": 10 for i in range(9)}))
    progress.take(events.RunRestarted(0, 1, 3, "rollout:0 on node 17 (10.20.30.40) died: " + "because " * 20))
    lines = shown(progress)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["embodied", "step", "restart", "now"]
    # Whoever reads it sees that something is missing.
    assert [line[-1] for line in (lines[0], lines[2])] == ["…", "…"]
    assert len(lines[2]) == 80


def test_the_live_view_of_a_narrow_terminal_is_one_line() -> None:
    progress = RunProgress(Clock())
    progress.take(events.Waiting("rollout: 2 processes", 30.0))
    assert shown(progress, 79) == ["embodied  waiting for rollout: 2 processes, 0:00, at most 30 s"]
    progress.take(STARTED)
    progress.take(events.StepFinished(1, METRICS))
    assert shown(progress, 79) == ["embodied  step 1/300  success 0.723, return 12.3, length 41.2  0:00"]
    assert [line[-1] for line in shown(progress, 30)] == ["…"]
    progress.end()
    assert shown(progress, 79) == ["embodied  ending; press Ctrl-C again to end at once"]


def test_the_live_view_of_a_run_without_an_end() -> None:
    progress = RunProgress(Clock())
    progress.take(STARTED._replace(last_step=None))
    progress.take(events.StepFinished(1, {}))
    assert shown(progress)[1] == "step      1  0:00"


def test_language_model_figures_appear_where_they_matter() -> None:
    plain = {
        "rollout/reward": 0.5,
        "rollout/response_length": 12.0,
        "rollout/truncated": 0.1,
        "rollout/groups_kept": 1.0,
        "rollout/staleness_mean": 0.0,
        "rollout/tokens_per_second": 1200.0,
        "train/actor/tokens_per_second": 900.0,
    }
    speeds = "tokens/s 1200, trained tokens/s 900"
    spelled = labels.figures_text(labels.headlines(plain, "env", "rollout"))
    assert spelled == f"reward 0.5, length 12, truncated 0.1, {speeds}"

    stale = {**plain, "rollout/groups_kept": 0.75, "rollout/staleness_mean": 1.2}
    spelled = labels.figures_text(labels.headlines(stale, "env", "rollout"))
    assert spelled == f"reward 0.5, length 12, truncated 0.1, kept 0.75, staleness 1.2, {speeds}"


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
    from rich.console import Console

    from rlinf_cli.live.terminal import block

    progress = RunProgress(Clock())
    progress.take(STARTED)
    progress.take(events.RunRestarted(0, 1, 3, "\x1b]0;x\x07 died \x9b2J [red]"))
    screen = Console(file=io.StringIO(), width=120, force_terminal=True, markup=False)
    screen.print(block(progress, "embodied", "runs/\x1b[2Jx"))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "died" in shown
    assert "[red]" in shown
    assert not any(part in shown for part in ("\x1b]", "\x1b[2J", "\x07", "\x9b"))


def test_duration_below_zero_is_unknown() -> None:
    """A run of which the machine's clock was set back meanwhile."""
    assert [labels.clock(seconds) for seconds in (-5.0, -0.1, 0.0, 3725.0)] == ["unknown", "unknown", "0:00", "1:02:05"]
