"""`rlinf inspect placement --measure`, and `rlinf train --rehearse`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recipes.embodied.embodied_flow import EmbodiedFlow
from rlinf_cli.interrupts import ExitCode, command_signals
from rlinf_cli.run.sweep_plan import PointState, SweepPlan, overrides_of, states
from rlinf_core.config.sections.group_rules import Site
from rlinf_core.job.load import load_job
from rlinf_core.process import pacing
from rlinf_core.runners.storage.run_folder import RunFolder, config_text_of
from tests.unit.cli.advice.test_advice import JOB as ADVISED
from tests.unit.cli.advice.test_advice import LINES, advice, both, record_run
from tests.unit.cli.typed import Cli, text_file

JOB = """
recipe: embodied
cluster:
  num_nodes: 2
  component_placement:
    actor: {node_group: fast, placement: 0}
    rollout: {node_group: slow, placement: 0}
    env: {node_group: fast, placement: 1}
  node_groups:
    - {label: fast, node_ranks: 0, accelerators: {model: H20, per_node: 4}}
    - {label: slow, node_ranks: 1, accelerators: {model: A800, per_node: 4}}
env: {train: {env_type: franka_kin, max_episode_steps: 8, total_num_envs: 64, max_steps_per_rollout_epoch: 8}}
actor: {global_batch_size: 512, micro_batch_size: 16}
algorithm: {update_epoch: 1}
runner: {max_steps: 50, val_check_interval: 10, save_interval: 10}
"""
FACTOR = {"H20": 1.0, "A800": 2.0}


class Recorded:
    """A queue whose runs have ended as soon as they are asked for: each with the calls that its file makes."""

    jobs: ClassVar[list[Any]] = []
    rules: ClassVar[list[dict[str, Any]]] = []
    without: ClassVar[tuple[str, ...]] = ()
    fails: ClassVar[tuple[str, ...]] = ()

    def __init__(self, plan: SweepPlan, folder: Path, parallel: int, on_change: Any, **rules: Any) -> None:
        self.stalled: set[str] = set()
        self.rules.append(rules)
        self._plan, self._folder, self._on_change = plan, folder, on_change

    def work(self) -> Mapping[str, PointState]:
        for point in self._plan.points:
            job = load_job(self._plan.file, overrides_of(self._plan, point, self._folder))
            job.raise_if_bad()
            self.jobs.append(job)
            folder = record(job, fails=point.name in self.fails)
            if point.name in self.without:
                folder.profile_file.unlink()
        ended = states(self._folder, self._plan)
        self._on_change(ended)
        return ended


def record(job: Any, *, fails: bool) -> RunFolder:
    config = job.config
    folder = RunFolder.create(config.runner, "embodied")
    folder.write_config(job)
    if fails:
        folder.end("failed", "out of memory")
        return folder
    rows: list[dict[str, Any]] = []
    step: dict[str, float] = {"time/sync_weights": 0.01, "time/generate_rollouts": 0.0, "time/actor_training": 0.0}
    for phase, (component, fix, slope) in LINES.items():
        group = config.cluster.component_placement[component].node_group[0]
        size = config.actor.global_batch_size if component == "actor" else config.env.train.total_num_envs
        seconds = (fix + slope * size) * FACTOR["H20" if group == "fast" else "A800"]
        part = "time/actor_training" if component == "actor" else "time/generate_rollouts"
        step[part] += seconds * (1 if component == "actor" or phase.endswith("values") else 8)
        called = {"component": component, "phase": phase, "processes": 1, "rows": size, "calls": 40}
        rows.append({**called, "seconds": 40 * seconds, "slowest": seconds, "quantiles": [seconds] * 21})
    step["time/step"] = sum(step.values())
    lines = [json.dumps({"step": number, "time": 0.0, "metrics": step}) for number in range(1, 5)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    profile = {"schema": "rlinf.profile/1", "cpus": 4, "load": 0.5, "rows": rows}
    folder.profile_file.write_text(json.dumps(profile))
    folder.end("finished")
    return folder


def joins_none(*_: object, **__: object) -> None:
    """Choose no cluster."""


def another(_: str) -> str:
    """Return a time that is not that of the first measurement."""
    return "another"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Recorded, "jobs", [])
    monkeypatch.setattr(Recorded, "rules", [])
    monkeypatch.setattr("rlinf_cli.advice.measuring.RunQueue", Recorded)
    for joins in ("run.driver.cluster_elsewhere", "advice.measuring.choose_cluster"):
        monkeypatch.setattr(f"rlinf_cli.{joins}", joins_none)
    return text_file(tmp_path / "job.yaml", JOB)


def places(job: Any) -> dict[str, str]:
    placed = job.config.cluster.component_placement
    return {name: f"{placed[name].node_group[0]}:{placed[name].rank_map}" for name in ("env", "rollout", "actor")}


def measured(cli: Cli, job: Path, *words: str) -> dict[str, Any]:
    return json.loads(cli("inspect", "placement", job, "--measure", "--json", *words).out)


def test_three_sizes_and_each_unlike_device_are_measured(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_TIMEOUT", "90")
    made = measured(cli, job, "runner.max_steps=9")
    # A trial neither waits nor stands still.
    assert Recorded.rules == [{"waits": False, "patience": 90.0}]
    sizes = [trial.config.env.train.total_num_envs for trial in Recorded.jobs]
    assert sizes == [16, 32, 64, 32, 32]
    assert [trial.config.actor.global_batch_size for trial in Recorded.jobs[:3]] == [128, 256, 512]
    assert {trial.world_sizes[name] for trial in Recorded.jobs for name in ("env", "rollout", "actor")} == {1}
    runner = Recorded.jobs[0].config.runner
    assert (runner.max_steps, runner.save_interval, runner.val_check_interval) == (4, -1, -1)
    groups = [" ".join(sorted({place.split(":")[0] for place in places(trial).values()})) for trial in Recorded.jobs]
    assert groups == ["fast slow", "fast slow", "fast slow", "fast", "slow"]
    assert Path(made["folder"]).name.startswith("measurement-")
    # Runs of trials are none of the folder of runs.
    assert json.loads(cli("runs", "--json").out)["runs"] == []
    lines = {(phase["phase"], phase["model"]): (phase["fix"], phase["slope"]) for phase in made["phases"]}
    assert lines["env/step", "H20"] == pytest.approx((0.07, 0.0042), rel=1e-3)
    # Seen in one size there: the shape of the other, twice as slow.
    assert lines["env/step", "A800"] == pytest.approx((0.14, 0.0084), rel=1e-3)
    # Sizes can be added.
    Recorded.jobs.clear()
    measured(cli, job, "env=8,rollout=48", "actor=1024")
    sizes = [trial.config.env.train.total_num_envs for trial in Recorded.jobs]
    assert sizes == [16, 32, 64, 8, 48, 128, 32, 32]


def test_advice_takes_the_folder_as_it_takes_runs(cli: Cli, job: Path) -> None:
    folder = measured(cli, job)["folder"]
    for name in (folder, Path(folder).name):
        made = advice(cli, job, name)
        assert (made["one_size"], len(made["runs"]), made["refused"]) == ([], 5, [])
        assert {place["group"] for place in made["best"][0]["components"].values()} == {"fast"}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("job.yaml --measure env=many", "`env=many` is no size"),
        ("job.yaml --measure env=0", "`env=0` is no size"),
        ("job.yaml --measure reward=8", "sizes can be chosen for env, rollout, actor"),
        ("job.yaml --measure env=8 --advise run", "cannot be used with --measure"),
        ("job.yaml --measure env={train:{max_episode_steps:4,total_num_envs:many}}", "total_num_envs"),
        ("- --measure", "each trial reads the file again"),
        # Robots are not moved.
        ("hetero18 recipe=embodied --measure", "`env` cannot be measured alone"),
    ],
)
def test_what_cannot_be_measured_is_said(cli: Cli, job: Path, typed: str, message: str) -> None:
    ended = cli("inspect", "placement", *typed.split())
    assert ended.code
    assert message in ended.err
    assert Recorded.jobs == []


def test_a_trial_that_fails_is_named_and_the_others_count(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "fails", ("03-now-64",))
    out = cli.printed(1, "inspect", "placement", job, "--measure")
    assert "03-now-64 failed: out of memory" in out
    assert "16, 32" in out
    monkeypatch.setattr("rlinf_core.runners.storage.run_folder.time.strftime", another)
    monkeypatch.setattr(Recorded, "fails", ("01-now-16", "02-now-32", "03-now-64", "04-fast-32", "05-slow-32"))
    ended = cli("inspect", "placement", job, "--measure")
    assert "no trial finished" in ended.err
    assert "01-now-16 failed: out of memory" in ended.err
    advised = cli("inspect", "placement", job, "--advise", "measurement-another")
    assert "no trial of the measurement finished" in advised.err


def test_trials_that_the_rules_refuse_are_left_out_by_name(
    cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(site: Site) -> None:
        places = site.cluster.component_placement
        if {label for place in places.values() for label in place.node_group} == {"slow"}:
            site.report("too-slow", "all on slow ones", ("cluster", "component_placement", "env"))

    monkeypatch.setattr("rlinf_cli.job.machine_rules.check", refuse)
    made = measured(cli, job)
    assert list(made["trials"]) == ["01-now-16", "02-now-32", "03-now-64", "04-fast-32"]
    assert made["left_out"] == ["05-slow-32 was left out: all on slow ones [too-slow]"]


OFF_POLICY = """
recipe: embodied
cluster: {num_nodes: 1, component_placement: {"actor,rollout,env": {node_group: node, placement: 0}}}
env: {train: {env_type: franka_kin, max_episode_steps: 8, total_num_envs: 16, max_steps_per_rollout_epoch: 8}}
actor:
  checkpoint_save_path: THEIRS/checkpoints
  global_batch_size: 64
  model: {model_type: squashed_policy}
algorithm: {loss_type: sac, replay: {recording_path: THEIRS/steps, storage: THEIRS/observations}}
runner:
  max_steps: 50
  metrics_port: 9400
  logger: {log_path: runs, logger_backends: [tensorboard]}
"""


def test_a_trial_writes_into_no_other_folder(cli: Cli, job: Path) -> None:
    theirs = job.parent / "theirs"
    job.write_text(OFF_POLICY.replace("THEIRS", str(theirs)))
    ended = cli("inspect", "placement", job, "--measure")
    assert Recorded.jobs, ended.err
    for trial in Recorded.jobs:
        # Its files have no name, and end with their process.
        (storage,) = (line for line in config_text_of(trial).splitlines() if str(theirs) in line)
        assert storage.split() == ["storage:", str(theirs / "observations")]
        runner = trial.config.runner
        assert runner.logger.log_path.startswith(str(job.parent / "runs/measurement-"))
        assert (runner.logger.logger_backends, runner.metrics_port) == ((), None)


def test_a_group_without_components_is_named(cli: Cli, job: Path) -> None:
    spare = "    - {label: spare, node_ranks: 2, accelerators: {model: H200, per_node: 4}}\n"
    job.write_text(JOB.replace("num_nodes: 2", "num_nodes: 3").replace("env: {train", f"{spare}env: {{train"))
    assert measured(cli, job)["left_out"] == ["`spare` was not measured: no component is placed there"]


def test_a_trial_without_record_does_not_hide_the_others(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "without", ("03-now-64",))
    made = measured(cli, job)
    (lacking,) = made["left_out"]
    assert "has no record of its calls" in lacking
    assert {phase["phase"] for phase in made["phases"]} == set(LINES)
    assert len(advice(cli, job, made["folder"])["runs"]) == 4


def test_after_ctrl_c_the_folder_is_named(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Recorded.work

    def ended_early(self: Recorded) -> Any:
        command_signals.code = ExitCode.INTERRUPTED
        return work(self)

    monkeypatch.setattr(Recorded, "work", ended_early)
    err = cli.fails(130, "inspect", "placement", job, "--measure")
    assert "5 of 5 trials are in runs/measurement-" in err
    assert "--advise runs/measurement-" in err


class Started:
    """A run in the place of the job's: of three steps that take 7 seconds."""

    jobs: ClassVar[list[Any]] = []
    paced: ClassVar[list[Any]] = []

    @classmethod
    def start(cls, file: str, overrides: Sequence[str], assume: Any, **_: Any) -> int:
        job = load_job(file, list(overrides))
        job.raise_if_bad()
        cls.jobs.append(job)
        cls.paced.append(pacing.wanted)
        config: Any = job.config
        folder = RunFolder.create(config.runner, "embodied")
        folder.write_config(job)
        lines = [{"step": step, "time": 0.0, "metrics": {"time/step": 7.0 + 2 * (step < 3)}} for step in range(1, 6)]
        folder.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        folder.end("finished")
        return 0


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Started, "jobs", [])
    monkeypatch.setattr(Started, "paced", [])
    monkeypatch.setattr("rlinf_cli.run.starting.start", Started.start)
    return text_file(tmp_path / "job.yaml", ADVISED.format(model="A800", memory=""))


def test_stand_ins_take_the_place_of_work_and_save_nothing(cli: Cli, advised: Path) -> None:
    runs = both(advised).split(",")
    words = ["runner.save_interval=5", "runner.max_staleness=1", "runner.max_steps=5"]
    ended = cli("train", advised, *runs, "--rehearse", *words)
    assert ended.code == 0, ended.err
    (rehearsed,) = Started.jobs
    config = rehearsed.config
    assert config.env.train.env_type.endswith("stand_ins:StandInEnv")
    assert config.actor.model.model_type.endswith("stand_ins:StandInPolicy")
    # As many numbers as the policy that it stands for: two networks of 128, from 18 states.
    assert config.actor.model.options["numbers"] > 30_000
    assert (config.runner.max_staleness, config.runner.max_steps) == (1, 5)
    assert (config.runner.save_interval, config.runner.val_check_interval) == (-1, -1)
    assert not config.runner.save_on_interrupt
    assert rehearsed.world_sizes == load_job(str(advised)).world_sizes
    paces = Started.paced[0].paces
    assert paces["env/step"].fix == pytest.approx(0.07, rel=0.01)
    assert set(paces) == {"env/step", "rollout/policy", "rollout/values", "training/update"}
    # Of the present process nothing is left.
    assert pacing.wanted is None
    assert "nothing was trained, and nothing saved" in ended.err
    assert "s a step predicted, 7 s rehearsed, over 2 steps" in ended.out
    # It is neither resumed, nor evaluated, nor logged, nor saved elsewhere.
    words = ["runner.resume_dir=auto", "runner.val_check_interval=2", "runner.logger.logger_backends=[tensorboard]"]
    cli.out("train", advised, runs[0], "--rehearse", *words, f"actor.checkpoint_save_path={advised.parent}/theirs")
    config = Started.jobs[1].config
    assert (config.runner.resume_dir, config.runner.val_check_interval) == (None, -1)
    assert (config.runner.logger.logger_backends, config.actor.checkpoint_save_path) == ((), None)


def test_no_one_takes_it_for_a_training(cli: Cli, advised: Path) -> None:
    run, _ = both(advised).split(",")
    assert cli("train", advised, run, "--rehearse").code == 0
    listed = json.loads(cli("runs", "--json").out)["runs"]
    assert {row["kind"] for row in listed if row["name"].startswith("rehearsal-")} == {"rehearsal"}
    assert {row["kind"] for row in listed if not row["name"].startswith("rehearsal-")} == {"training"}
    assert "embodied, rehearsal" in cli("runs").out
    name = next(row["name"] for row in listed if row["kind"] == "rehearsal")
    assert f"run `{name}` is a rehearsal" in cli("inspect", "placement", advised, "--advise", name).err


def test_the_last_run_is_taken_where_none_is_named(cli: Cli, advised: Path) -> None:
    assert "no run of recipe `embodied` tells how long its work takes" in cli("train", advised, "--rehearse").err
    for name in ("first", "last"):
        run = record_run(advised, name, "0", processes=1)
        state = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**state, "status": "finished"}))
    assert json.loads(cli("train", advised, "--rehearse", "--json").out)["runs"][0].startswith("last-")
    # A rehearsal is newer now, and has no record of work.
    assert json.loads(cli("train", advised, "--rehearse", "--json").out)["runs"][0].startswith("last-")


def test_what_was_never_seen_is_not_rehearsed(cli: Cli, advised: Path) -> None:
    run = record_run(advised, "one", "0", processes=1)
    advised.write_text(ADVISED.format(model="H20", memory=""))
    assert "on H20 was never seen by these runs" in cli("train", advised, str(run), "--rehearse").err
    assert Started.jobs == []


def test_what_cannot_be_rehearsed_is_said(cli: Cli, advised: Path) -> None:
    run, _ = both(advised).split(",")
    for words, message in [
        ((advised, run, "actor.seed=1,2"), "`actor.seed=1,2`: rehearse one value after the other"),
        (("-", run), "give a path, not `-`"),
        ((advised, run, "runner.only_eval=true"), "no steps of training that could be rehearsed"),
        ((advised, "no-run"), "there is no run `no-run`"),
        ((advised, "--seeds", "2"), "cannot be used with --rehearse"),
        (("math/sums-laptop", run), "one of recipe `embodied`, and the file is of `math`"),
    ]:
        ended = cli("train", *words, "--rehearse")
        assert ended.code, words
        assert message in " ".join(ended.err.split()), (words, ended.err)
    (Path(run) / "profile.json").unlink()
    assert "has no record of its calls" in cli("train", advised, run, "--rehearse").err
    assert Started.jobs == []


def test_the_rehearsal_of_another_process_is_not_summed_up(
    cli: Cli, advised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = both(advised).split(",")
    names: list[str] = []

    def beside(*arguments: Any, **options: Any) -> int:
        Started.start(*arguments, **options)
        (own,) = Path("runs").glob("rehearsal-*")
        Started.start(*arguments, **options)
        (last,) = set(Path("runs").glob("rehearsal-*")) - {own}
        names.append(own.name)
        state = json.loads((last / "run.json").read_text())
        (last / "run.json").write_text(json.dumps({**state, "pid": 1}))
        return 0

    monkeypatch.setattr("rlinf_cli.run.starting.start", beside)
    folder = json.loads(cli("train", advised, run, "--rehearse", "--json").out)["folder"]
    assert [Path(folder).name] == names


@pytest.mark.parametrize(
    "name", ["embodied/franka-hil-2arms", "embodied/franka-rlpd-1arm", "embodied/gymnasium-sac-laptop"]
)
def test_no_robot_person_or_recording_is_part_of_it(name: str) -> None:
    unrecorded = ["data.train_data_paths=[]"]
    loaded: Any = load_job(name, unrecorded)
    rehearsed: Any = load_job(name, [*unrecorded, *EmbodiedFlow(loaded.config).rehearsal()])
    rehearsed.raise_if_bad()
    train = rehearsed.config.env.train
    assert train.env_type.endswith("stand_ins:StandInEnv")
    assert (train.intervention.source, train.judge.source) == ("none", "environment")
    assert rehearsed.config.algorithm.replay.recording_path is None
    # Each step of a rehearsal learns, as those that were recorded, and none computes actions.
    assert rehearsed.config.algorithm.learning_starts == 1
    assert rehearsed.config.algorithm.random_steps > 10**6


@pytest.mark.parametrize(
    "name", ["math/sums-laptop", "agent/calculator-laptop", "math/gsm8k-1gpu", "agent/search-laptop"]
)
def test_language_models_are_neither_loaded_nor_saved(name: str) -> None:
    loaded: Any = load_job(name)
    flow = loaded.recipe.load(loaded.recipe.flow)(loaded.config)
    rehearsed: Any = load_job(name, list(flow.rehearsal()))
    rehearsed.raise_if_bad()
    assert not rehearsed.config.runner.saves_model
    assert rehearsed.config.runner.sample_interval == -1
