"""Planted causes, each named right and alone; and runs in which nothing is wrong."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from recipes.embodied.envs.repeating import RaisedTwiceError
from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.loop.group_accounts import nothing_to_learn
from recipes.training.arrays import NonFiniteError
from recipes.training.updater import UntrainedError
from rlinf_cli.runs.metric_columns import MetricColumn, series_of
from rlinf_cli.why import signs
from rlinf_cli.why.diagnosis import diagnose, why_text
from rlinf_cli.why.facts import Incident, RunFacts, read_facts
from rlinf_cli.why.findings import EVIDENCE, FindingKind, causes, failure_causes, fields_of
from rlinf_core.errors import (
    CheckpointError,
    CommunicationTimeoutError,
    DeadlockError,
    RayStartError,
    RLinfError,
    RunError,
)
from rlinf_core.process.proc import identity
from rlinf_core.runners.evidence import failed_processes
from rlinf_core.runners.metrics import EVALUATION_TIME, read_metrics
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.first_contact import ContactCheck, note_comparisons
from rlinf_core.runners.storage.run_events import quarantine
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.why.made_runs import STEPS, Metric, add_failure, codes_of, dead, diagnosis_of, made_run, raised

GOOD = Path(__file__).parents[3] / "data" / "good_runs"


def after(step: int, value: float, before: float) -> Metric:
    return lambda at: value if at >= step else before


LEARNING: dict[str, tuple[dict[str, Metric], str, str, int | None]] = {
    "reward is 0 for all": (
        {"rollout/reward": 0.0, "rollout/correct": 0.0, "rollout/reward_std": 0.0, "rollout/groups_equal": 1.0,
         "train/actor/grad_norm": 0.0}, "", "reward-never-varies", 1,
    ),
    "return of episodes never varies": (
        {"rollout/reward_std": None, "rollout/correct": None, "rollout/reward": 0.0, "env/return": 0.0,
         "rollout/advantages_std": 0.0}, "", "reward-never-varies", 1,
    ),
    "groups equal from step 9": (
        {"rollout/groups_equal": after(9, 1.0, 0.4), "train/actor/grad_norm": after(9, 0.0, 1.0)},
        "", "groups-equal", 9,
    ),
    "reward function fails": (
        {"failed/error": 40.0, "rollout/correct": 0.1},
        "data: {rollout_batch_size: 16}\nalgorithm: {group_size: 8}\n", "reward-fails", 1,
    ),
    "advantages constant": ({"rollout/advantages_std": after(5, 0.0, 1.0)}, "", "advantages-constant", 5),
    "answers cut off": ({"rollout/truncated": 1.0}, "", "answers-truncated", 1),
    "learning rate 0 from the start": ({"train/actor/lr": 0.0, "train/actor/weights_changed": 0.0},
                                       "", "learning-rate-zero", 1),
    "schedule ends too early": ({"train/actor/lr": after(12, 0.0, 1e-3)}, "", "learning-rate-zero", 12),
    "updates rounded away": (
        {"train/actor/lr": 1e-7, "train/actor/weights_changed": 0.01},
        "actor: {model: {precision: bf16}}\n", "updates-rounded-away", 1,
    ),
    "gradients are clipped to nothing": (
        {"train/actor/weights_changed": 0.0}, "actor: {optim: {clip_grad: 1.0e-30}}\n", "gradients-clipped-away", 1,
    ),
    "no gradient": ({"train/actor/grad_norm": 0.0}, "", "no-gradient", 1),
    "engine keeps the first weights": (
        {"train/logprob_gap/mean": lambda step: 1e-6 if step < 4 else 0.03 * step,
         "train/actor/clip_fraction": after(10, 0.9, 0.1)}, "", "engine-has-other-weights", 4,
    ),
    "all samples clipped": ({"train/actor/clip_fraction": 0.97}, "", "all-clipped", 1),
    "policy does not change": (
        {"train/actor/clip_fraction": 0.0, "train/actor/approx_kl": 0.0},
        "algorithm: {update_epoch: 4}\n", "policy-does-not-change", 11,
    ),
    "entropy collapsed": (
        {"train/actor/entropy": lambda step: 1.0 if step < 8 else 1e-3, "rollout/correct": 0.1},
        "", "entropy-collapsed", 8,
    ),
    "entropy collapsed until all answers were equal": (
        {
            "train/actor/entropy": lambda step: 1.0 if step < 8 else 0.04 if step < 10 else 0.0,
            "rollout/groups_equal": after(10, 1.0, 0.2), "rollout/correct": 0.1,
        },
        "", "entropy-collapsed", 10,
    ),
    "staleness at its bound": (
        {"rollout/staleness_mean": 4.0, "rollout/correct": 0.3}, "runner: {max_staleness: 4}\n",
        "staleness-at-bound", 1,
    ),
    "loss is NaN": ({"train/actor/policy_loss": after(6, math.nan, 0.1)}, "", "not-finite", 6),
    "updates skipped": ({"train/actor/skipped_updates": after(6, 4.0, 0.0)}, "", "updates-skipped", 6),
    "black camera": ({"rollout/observations_std": 0.0}, "", "observations-constant", 1),
    "policy jumps": (
        {"train/actor/approx_kl": after(9, 4.0, 0.01), "train/actor/clip_fraction": after(9, 0.95, 0.1),
         "rollout/correct": after(9, 0.0, 0.8)}, "", "policy-jumps", 9,
    ),
    "policy forgets": ({"rollout/correct": after(14, 0.02, 0.7)}, "", "reward-collapsed", 14),
    "evaluation on training seeds": (
        {"eval/return": 1.0}, "env: {train: {seed: 7, task: pick}, eval: {seed: 7, task: pick}}\n",
        "evaluated-on-training", None,
    ),
    "evaluation on training rows": (
        {"eval/reward": 1.0}, "data: {train_data_paths: [/d/a.jsonl, /d/b.jsonl], val_data_paths: [/d/b.jsonl]}\n",
        "evaluated-on-training", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", LEARNING)
def test_learning_cause_is_the_only_one_named(tmp_path: Path, planted: str) -> None:
    metrics, config, code, step = LEARNING[planted]
    run = made_run(tmp_path, metrics, config)
    diagnosis = diagnosis_of(run)
    assert [finding.code for finding in diagnosis.learning] == [code]
    (finding,) = diagnosis.learning
    assert finding.step == step
    assert all((finding.what, finding.evidence, finding.do))


def test_rows_name_functions_and_fields_that_are_there() -> None:
    fields = fields_of(Incident("failed", "it failed", "run.json", None, 1)).keys()
    for row in failure_causes():
        assert row.shown in EVIDENCE
        assert fields >= (row.when or {}).keys()
        named = {field for text in (row.what, row.do) for _, field, _, _ in Formatter().parse(text) if field}
        assert named <= fields | re.compile(row.words).groupindex.keys()
    for sign in signs.signs():
        functions = [name for name in (sign.rule, sign.when, sign.shown) if name]
        assert all(callable(getattr(signs, name)) for name in functions)
        assert bool(sign.metric) != bool(sign.rule)
    codes = {row.code for row in failure_causes()} | {sign.code for sign in signs.signs()}
    assert {*causes()["follows"], *chain(*causes()["follows"].values())} <= codes


FAILURES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "killed": ("`EnvGroup:0` died in `interact`", dead(signal="SIGKILL"), "killed-by-signal", "SIGKILL"),
    "killed, and not by the kernel": (
        "`EnvGroup:0` died", dead(signal="SIGKILL", why="the last lines of its log:\n  out of memory?"),
        "killed-by-signal", "SIGKILL",
    ),
    "killed, as a peer's words say": (
        "`EnvGroup:0` died", dead(why="it was killed by SIGKILL"), "killed-by-signal", "was killed by SIGKILL",
    ),
    "segmentation fault": (
        "`EnvGroup:0` died in `interact`", dead(signal="SIGSEGV", why="it crashed: Segmentation fault"),
        "crashed", "SIGSEGV",
    ),
    "os._exit": ("`EnvGroup:0` died in `interact`", dead(exit_code=3), "exited", "exit code 3"),
    "out of memory": (
        "`EnvGroup:0` died in `interact`",
        dead(signal="SIGKILL", out_of_memory="Out of memory: Killed process 4711 (python)"), "out-of-memory", "memory",
    ),
    "simulator process": (
        "`EnvGroup:0` died in `interact`",
        dead(bases=["SimulatorDiedError", "WorkerDiedError"],
             why="simulator process 1 of 2 (`pick`): signal 11 (SIGSEGV), stepping environment 0; its last words:\n"
             "    the mesh has 0 faces"),
        "simulator-died", "signal 11 (SIGSEGV), stepping environment 0",
    ),
    "death of unknown cause": ("`EnvGroup:0` died in `interact`", dead(), "died", "not known"),
    "machine lost": (
        "`EnvGroup:0` died in `interact`", dead(why="its node left the cluster"), "node-lost", "machine",
    ),
    "raylet killed": ("`raylet` died", dead(name="raylet", signal="SIGKILL", component=None), "watcher-died", "raylet"),
    "disk full": (
        "the run folder cannot be written",
        raised("rlinf_core.errors.RunError", "[Errno 28] No space left on device: '/data/runs'", "RLinfError"),
        "disk-full", "no room on the disk",
    ),
    "no shared memory": (
        "`ActorGroup:0` failed", raised("builtins.OSError", "[Errno 28] No space left on device: '/dev/shm/rlinf'"),
        "disk-full", "/dev/shm",
    ),
    "accelerator's memory": (
        "`ActorGroup:0` failed", raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
        "accelerator-memory", "accelerator",
    ),
    "adapter that never arrived": (
        "`RolloutGroup:0` failed in `load_weights`",
        raised("rlinf_core.errors.RLinfError", "the engine's weights of version 3 differ from the actor's",
               why="their fingerprint is ab, the actor's is cd"),
        "weights-not-arrived", "version 3",
    ),
    "no reward could be computed": (
        "step 4 has no samples to learn from",
        raised("rlinf_core.errors.RunError", "step 4 has no samples to learn from\n"
               "  why: too few answers to 32 prompts could be scored; the first: NameError: x", "RLinfError"),
        "reward-fails", "reward fails",
    ),
    "tool hangs": (
        "9 of 16 answers of step 4 failed: error 9",
        raised("rlinf_core.errors.RunError", "9 of 16 answers of step 4 failed: error 9\n  why: the first: the tool"
               " `lookup`: no answer within 5 s\n  help: `runner.max_failed_fraction` of them may fail", "RLinfError"),
        "tool-fails", "the tool `lookup` fails: no answer within 5 s",
    ),
    "simulators fail": (
        "the simulators of 7 episodes failed, and 1 episodes ended",
        raised("rlinf_core.errors.RunError", "the simulators of 7 episodes failed, and 1 episodes ended\n"
               "  help: mend the simulator; `runner.max_failed_fraction` of the episodes may fail", "RLinfError"),
        "simulators-fail", "simulators raise",
    ),
    "NaN": (
        "`ActorGroup:0` failed in `run_training`",
        raised("recipes.training.arrays.NonFiniteError", "`gradient of actor.0.weight` is nan", "RLinfError"),
        "not-finite", "actor.0.weight",
    ),
    "a tensor does not train": (
        "`ActorGroup:0` failed",
        raised("recipes.training.updater.UntrainedError", "`critic.1.bias` trains, but has no gradient", "RLinfError"),
        "untrained", "critic.1.bias",
    ),
    "environment raises": (
        "`EnvGroup:0` failed in `interact`",
        raised("recipes.embodied.envs.repeating.RaisedTwiceError",
               "the simulator of `pick` raised KeyError: 'joint' at /home/me/env.py:12 in step (environments 0 to 7)",
               "SimulatorError", "RLinfError"),
        "simulator-raises", "/home/me/env.py:12 in step",
    ),
    "environment without memory": (
        "`EnvGroup:0` failed in `interact`",
        raised("recipes.embodied.envs.repeating.RaisedTwiceError",
               "the simulator of `pick` raised MemoryError: Unable to allocate 8.00 PiB", "SimulatorError"),
        "host-memory", "8.00 PiB",
    ),
    "deadlock": (
        "`EnvGroup:0` failed", raised("rlinf_core.errors.DeadlockError", "deadlock among `env:0`, `rollout:0`"),
        "deadlock", "env:0",
    ),
    "time-out": (
        "`EnvGroup:0` failed",
        raised("rlinf_core.errors.CommunicationTimeoutError", "`recv from actor:0` did not finish in 30 s"),
        "timed-out", "recv from actor:0",
    ),
    "damaged checkpoint": (
        "`global_step_4` is damaged", raised("rlinf_core.errors.CheckpointError", "`global_step_4` is damaged"),
        "checkpoint", "damaged",
    ),
    "users' exception": (
        "`ActorGroup:0` failed in `run_training`: KeyError: 'joint'",
        raised("builtins.KeyError", "'joint'", position="/home/me/env.py:12 in step"),
        "exception", "/home/me/env.py:12 in step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", FAILURES)
def test_failure_is_named_with_evidence_and_remedy(tmp_path: Path, planted: str) -> None:
    what, process, code, words = FAILURES[planted]
    run = made_run(tmp_path, status=RunStatus.FAILED, reason=what)
    add_failure(run, what, process)
    diagnosis = diagnosis_of(run)
    ((incident, finding),) = diagnosis.failures
    assert (finding.code, incident.ended, list(diagnosis.learning)) == (code, True, [])
    assert words in "\n".join((finding.what, *finding.evidence))
    assert any("failure.json" in line for line in finding.evidence)
    assert finding.do


# Errors that carry their code are known by it, in whatever words.
CODED: tuple[RLinfError, ...] = (
    DeadlockError(("env:0", "rollout:0"), "env:0 waits for rollout:0"),
    CommunicationTimeoutError("recv from actor:0", 30.0, help="wait longer"),
    CheckpointError("it is damaged"),
    RayStartError("it does not start"),
    NonFiniteError("reward", float("nan"), "step 12"),
    UntrainedError(["critic"], "step 1", "values need it", "freeze it"),
    RaisedTwiceError("it raised"),
    *(RunError("it failed", code=code) for code in ("groups-equal", "prompts-skipped", "reward-fails")),
    *(RunError("it failed", code=code) for code in ("simulators-fail", "weights-not-arrived")),
    nothing_to_learn(4, [GroupReport(0, 4, 0, "", "", 0, (), (), 0, {}, {}, 0, 0, skipped=True)]),
)


@pytest.mark.parametrize("error", CODED, ids=lambda error: f"{type(error).__name__} {error.code}")
def test_coded_error_is_known_by_its_code(tmp_path: Path, error: RLinfError) -> None:
    run = made_run(tmp_path, status=RunStatus.FAILED)
    (process,) = failed_processes(error, {})
    add_failure(run, error.message, process.model_dump())
    ((_, finding),) = diagnosis_of(run).failures
    codes = {"RayStartError": "cluster", "RaisedTwiceError": "simulator-raises"}
    assert finding.code == error.code == codes.get(type(error).__name__, error.code) != ""
    assert error.help is None or error.code not in {"timed-out", "untrained"} or finding.do == (error.help,)


def test_first_failure_comes_before_what_followed(tmp_path: Path) -> None:
    run = made_run(tmp_path, status=RunStatus.FAILED)
    consequence = raised("rlinf_core.errors.ChannelClosed", "the channel is closed", consequence=True)
    add_failure(run, "`EnvGroup:0` died", dead(signal="SIGKILL"), consequence, step=3, ended=False, at=1.0e9)
    add_failure(run, "no space", raised("builtins.OSError", "No space left on device"), step=9, at=1.1e9)
    (_, first), (_, last) = diagnosis_of(run).failures
    assert (first.code, last.code) == ("killed-by-signal", "disk-full")
    assert first.followed == ("`ActorGroup:0`: ChannelClosed: the channel is closed",)


@pytest.mark.parametrize(
    ("known", "code"),
    [
        ((), "driver-vanished"),
        (("kernel: Out of memory: Killed process 4711 (rlinf)",), "out-of-memory"),
        (("robot1 was restarted since: the kernel's boot is another one than the driver's",), "machine-restarted"),
    ],
)
def test_vanished_driver_is_told_by_its_machine(tmp_path: Path, known: tuple[str, ...], code: str) -> None:
    run = made_run(tmp_path)
    run.update(status=RunStatus.RUNNING, boot="", pid=1, start="1:1", ended=None, host="elsewhere")
    assert codes_of(run) == []
    vanished = "its process vanished: it was killed, or its machine went down"
    facts = RunFacts(run.path, RunStatus.FAILED, vanished, driver_end=known)
    ((_, finding),) = diagnose(facts).failures
    assert finding.code == code
    assert set(known) <= set(finding.evidence)


def test_driver_killed_at_this_moment_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lived = identity(process.pid)
    process.kill()
    process.communicate()
    run = made_run(tmp_path)
    run.update(status=RunStatus.RUNNING, pid=process.pid, start=lived, ended=None)
    assert codes_of(run) == ["driver-vanished"]


INTERRUPTIONS = {
    "Ctrl-C": ("interrupted", (), "interrupted", "Ctrl-C"),
    "SIGTERM": ("terminated", (), "terminated", "SIGTERM"),
    "a warning of the scheduler": ("terminated by SIGUSR1", (), "terminated", "SIGUSR1"),
    "time limit": ("terminated", ("Slurm job 17 reaches its time limit at 10:00",), "time-limit", "Slurm job 17"),
    "stop --force": ("killed by `rlinf stop --force`", None, "stopped", "--force"),
}


@pytest.mark.parametrize("planted", INTERRUPTIONS)
def test_interruption_is_no_failure(tmp_path: Path, planted: str) -> None:
    reason, details, code, words = INTERRUPTIONS[planted]
    run = made_run(tmp_path, status=RunStatus.INTERRUPTED, reason=reason)
    if details is not None:
        run_events.append_event(run.path, run_events.INTERRUPTED, STEPS, reason, ["saved: global_step_20", *details])
    diagnosis = diagnosis_of(run)
    ((incident, finding),) = diagnosis.failures
    assert (finding.code, finding.kind, incident.ended) == (code, FindingKind.INTERRUPTION, True)
    assert words in finding.what
    assert "what failed first" not in why_text(diagnosis, "made")


def test_interruption_before_a_resume_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path)
    with monkeypatch.context() as ahead:
        # The clock is set back before the resumption.
        ahead.setattr("rlinf_core.runners.storage.run_events.time.time", lambda: 9e9)
        run_events.append_event(run.path, run_events.INTERRUPTED, 5, "interrupted")
    run_events.append_event(run.path, run_events.RESUMED, 5, "resumed from global_step_5 with actor 1")
    run_events.append_event(run.path, run_events.FINISHED, STEPS, "finished after step 20")
    assert diagnosis_of(run).clean


STOPPED = "`EnvGroup:0` (pid 7) is stopped, as by SIGSTOP; `kill -CONT 7` continues it"


@pytest.mark.parametrize(
    ("quiet", "warnings", "codes"),
    [(40.0, (STOPPED,), ["stalled"]), (40.0, (), []), (8.0, (STOPPED,), []), (40.0, ("2 keys have no effect",), [])],
)
def test_standstill_needs_silence_and_a_warning(quiet: float, warnings: tuple[str, ...], codes: list[str]) -> None:
    moments = [1e9 + 2.0 * step for step in range(10)]
    looked = moments[-1] + quiet
    facts = RunFacts(GOOD, RunStatus.RUNNING, "", step=10, moments=moments, looked=looked, warnings=warnings)
    diagnosis = diagnose(facts)
    assert [finding.code for _, finding in diagnosis.failures] == codes
    assert ("why it does not go on" in why_text(diagnosis, "made")) == bool(codes)


@pytest.mark.parametrize(
    ("before", "quiet", "codes"),
    [([30.0], 120.0, []), ([30.0], 160.0, ["stalled"]), ([], 160.0, [])],
)
def test_an_evaluation_may_take_what_others_took(before: list[float], quiet: float, codes: list[str]) -> None:
    moments = [1e9 + 2.0 * step for step in range(10)]
    columns = {EVALUATION_TIME: MetricColumn([5] * len(before), before)}
    facts = RunFacts(GOOD, RunStatus.RUNNING, "", step=10, moments=moments, columns=columns, evaluates=True)
    diagnosis = diagnose(replace(facts, looked=moments[-1] + quiet, held_up=(STOPPED,)))
    assert [finding.code for _, finding in diagnosis.failures] == codes
    assert ("the last evaluations took 30 s each" in why_text(diagnosis, "made")) == bool(codes)


def test_the_log_says_whether_the_driver_evaluates(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    log = run.log_file("driver", 0)
    log.parent.mkdir(parents=True)
    lines = "2026-11-26 07:47:43,637 INFO [driver] after step 9, evaluating for 30.8 s\n"
    log.write_text(lines)
    assert read_facts(run).evaluates
    log.write_text(lines + "2026-11-26 07:47:51,000 INFO [driver] evaluated at step 9: success 0.85\n")
    assert not read_facts(run).evaluates
    # Warnings after the last step are read once.
    old, new = "2026-11-26 07:47:40,000 WARNING [driver] early", f"2026-11-26 07:47:51,000 WARNING [driver] {STOPPED}"
    log.write_text(f"{old}\n2026-11-26 07:47:43,637 INFO [driver] step 9/20  0:36\n{new}\n{new}\n")
    assert read_facts(run).warnings == [STOPPED]


def test_reward_that_refuses_right_answers_is_the_cause(tmp_path: Path) -> None:
    constant: dict[str, Metric] = {"rollout/reward": 0.0, "rollout/reward_std": 0.0, "rollout/correct": 0.0}
    run = made_run(tmp_path, {**constant, "train/actor/entropy": 0.0, "rollout/groups_equal": 1.0})
    note = "8 of 8 reference answers do not pass `reward_type: mine:score`"
    check = ContactCheck("reward", "right answers of `data`", "`reward_type: mine:score`", "differs", note=note)
    note_comparisons(run.path, [check])
    assert codes_of(run) == ["right-answers-fail"]
    run = made_run(tmp_path)
    note_comparisons(run.path, [ContactCheck("actor", "log-probabilities", "the trainer's", "differs", 0.3, 0.1)])
    assert codes_of(run) == ["first-contact-differs"]


def test_item_that_was_set_aside_is_named(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    quarantine(run.path, "task", "17", 3, ["`agents:0` died"] * 3)
    (finding,) = diagnosis_of(run).learning
    assert finding.what == "3 processes died of task 17, which was quarantined"
    assert finding.evidence[0] == "quarantine/task-17.json: `agents:0` died"


def test_item_comes_before_the_deaths_that_it_caused(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    for step, name in enumerate(("EnvGroup:0", "EnvGroup:0", "ActorGroup:0", "EnvGroup:0"), 3):
        add_failure(run, f"`{name}` died", dead(name=name), step=step, ended=False, alone=True, at=1e9 + step)
    quarantine(run.path, "episode", "18-17", 3, ["`EnvGroup:0` died"] * 3, {"seed": 18})
    diagnosis = diagnosis_of(run)
    assert [finding.code for _, finding in diagnosis.failures] == ["items-set-aside", "died"]
    first = diagnosis.failures[0][1]
    assert first.what == "3 processes died of episode 18-17, which was quarantined"
    assert len(first.followed) == 3
    assert "`rlinf why --replay episode-18-17`" in first.do[0]
    assert diagnosis.learning == []


SOLVED: dict[str, Metric] = {
    "rollout/correct": lambda step: min(1.0, step / 8), "rollout/reward": lambda step: min(1.0, step / 8),
    "rollout/reward_std": after(8, 0.0, 0.4), "rollout/groups_equal": after(8, 1.0, 0.4),
    "train/actor/entropy": lambda step: 1.0 if step < 8 else 1e-4,
}  # fmt: skip
NO_SAMPLES: dict[str, Metric] = {"rollout/groups_equal": after(9, 1.0, 0.4), "train/actor/entropy": after(9, 0.0, 1.0)}


@pytest.mark.parametrize(
    ("metrics", "config", "codes"),
    [
        pytest.param({}, "", [], id="learns"),
        pytest.param({"rollout/staleness_mean": 4.0}, "runner: {max_staleness: 4}\n", [], id="stale-and-learns"),
        pytest.param(SOLVED, "", [], id="solved"),
        pytest.param(NO_SAMPLES, "", ["groups-equal"], id="a-step-without-samples-is-no-collapse"),
    ],
)
def test_run_that_learns_has_no_finding(
    tmp_path: Path, metrics: dict[str, Metric], config: str, codes: list[str]
) -> None:
    assert codes_of(made_run(tmp_path, metrics, config)) == codes


@pytest.mark.parametrize(
    "name",
    [
        "embodied/pick-laptop",
        "math/sums-laptop",
        "embodied/cartpole-laptop",
        "sft/pick-laptop",
        "agent/calculator-laptop",
        "embodied/pick-grpo-laptop",
    ],
)
def test_good_runs_of_shipped_files_have_no_finding(name: str) -> None:
    lines = read_metrics(GOOD / f"{name}.jsonl")
    config: dict[str, object] = json.loads((GOOD / f"{name}.json").read_text())
    facts = RunFacts(GOOD, RunStatus.FINISHED, "", step=lines[-1].step, columns=series_of(lines).columns, config=config)
    assert len(lines) >= 10
    assert [finding.what for finding in diagnose(facts).learning] == []


@pytest.mark.parametrize(
    ("details", "code"), [(["node 1 joined and was lost"], "node-lost"), ([], "died")], ids=["lost", "back"]
)
def test_lost_node_is_named_with_who_serves_as_it(tmp_path: Path, details: list[str], code: str) -> None:
    run = made_run(tmp_path)
    add_failure(run, "`EnvGroup:0` died in `interact`", dead(), ended=False)
    run_events.append_event(run.path, run_events.NODES, 6, "node 3, a spare, serves as node 1", details)
    ((_, finding),) = diagnosis_of(run).failures
    assert finding.code == code
    named = "node 3, a spare, serves as node 1; node 1 joined and was lost" in finding.evidence
    assert named is bool(details)
