"""The embodied recipe on workers: it trains, learns, repeats itself, also after kill -9, and with many ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from ruamel import yaml

from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    PhaseStarted,
    RunFinished,
    RunRestarted,
    RunStarted,
    StepFinished,
    WorkersRelaunched,
)
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.run_events import read_bundles
from tests.integration.recipes.conftest import SMALL, SPANNING, Killer, Run, Train
from tests.kernel import KEEPS_ENDS

pytestmark = pytest.mark.timeout(600)

NAMES = {
    "env/return",
    "env/episode_len",
    "env/success_once",
    "env/success_at_end",
    "train/actor/policy_loss",
    "train/actor/approx_kl",
    "train/actor/clip_fraction",
    "train/actor/grad_norm",
    "train/actor/lr",
    "train/actor/entropy",
    "env/steps",
    "speed/env_steps_per_second",
    "speed/samples_per_second",
    "memory/actor_gib",
    "train/critic/value_loss",
    "train/critic/explained_variance",
    "time/step",
    "time/sync_weights",
    "time/generate_rollouts",
    "time/cal_adv_and_returns",
    "time/actor_training",
    "rollout/reward",
    "rollout/advantages_mean",
}


def learned(run: Run) -> list[dict[str, float]]:
    """Return what does not depend on the clock and the machine, step by step."""
    return [
        {name: value for name, value in record.metrics.items() if not name.startswith(("time/", "speed/", "memory/"))}
        for record in run.metrics
    ]


def test_a_run_tells_and_keeps_what_it_promises(spanning: Run) -> None:
    run = spanning
    started, finished = run.of(RunStarted)[0], run.of(RunFinished)[0]
    assert (started.first_step, started.last_step, started.components) == (1, 5, {"actor": 1, "rollout": 1, "env": 1})
    assert [item.step for item in run.of(StepFinished)] == [1, 2, 3, 4, 5]
    assert [item.step for item in run.of(Evaluated)] == [0, 2, 4, 5]
    assert [item.step for item in run.of(CheckpointSaved)] == [3, 5]
    assert [record.step for record in run.metrics] == [1, 2, 3, 4, 5]
    # The first episodes have ended by then.
    assert run.metrics[2].metrics.keys() >= NAMES
    assert {"eval/return", "eval/success_at_end"} <= finished.metrics.keys()
    assert finished.step == 5
    lengths = [record.metrics["env/episode_len"] for record in run.metrics if "env/episode_len" in record.metrics]
    assert 0 < min(lengths) <= max(lengths) <= 25
    assert {(record.metrics["rollout/staleness"]) for record in run.metrics} == {0}


# Of gymnasium; the run is cut in the middle of episodes, which the second half continues.
CART_POLE = (
    *("env.train.env_type=gymnasium", "env.train.task=CartPole-v1", "env.train.max_episode_steps=null"),
    "env.train.rollout_epoch=2",
)


def is_cut_in_an_episode(run: Run) -> bool:
    return max(record.metrics.get("env/episode_len", 0) for record in run.metrics) > 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "middle", "last"), [((), 2, 4), (CART_POLE, 4, 6)], ids=["once", "across passes"]
)
def test_a_run_repeats_itself_and_its_halves_make_the_whole(
    train: Train, overrides: tuple[str, ...], middle: int, last: int
) -> None:
    halves = (*overrides, "runner.logger.experiment_name=halves")
    whole = train(*overrides, f"runner.max_steps={last}", "runner.logger.experiment_name=whole")
    half = train(*halves, f"runner.max_steps={middle}")
    rest = train(*halves, f"runner.max_steps={last}", "runner.resume_dir=auto")
    assert rest.folder.path == half.folder.path
    assert rest.of(RunStarted)[0].first_step == middle + 1
    assert rest.ends_like(whole)
    assert learned(rest) == learned(whole)
    assert is_cut_in_an_episode(whole) == bool(overrides)


@pytest.mark.nightly
def test_run_resumed_within_episodes_equals_the_whole_run(train: Train, spanning: Run) -> None:
    (middle,) = [item.path for item in spanning.folder.checkpoints.complete() if item.step == 3]
    rest = train(*SPANNING, "runner.max_steps=5", "runner.val_check_interval=2", f"runner.resume_dir={middle}")
    assert rest.of(RunStarted)[0].first_step == 4
    assert rest.ends_like(spanning)
    assert learned(rest)[-2:] == learned(spanning)[-2:]
    assert is_cut_in_an_episode(spanning)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "env.train.rollout_epoch=2",
            "env.train.auto_reset=false",
            "actor.micro_batch_size=20",
            "actor.enable_offload=true",
            "rollout.enable_offload=true",
            "actor.model.precision=bf16",
            "actor.model.num_action_chunks=2",
            "algorithm.entropy_bonus=0.01",
            "algorithm.normalize_rewards=true",
            "runner.max_steps=2",
        ),
        *(
            pytest.param(
                (
                    "env.train.env_type=franka_vision",
                    "env.train.task=touch",
                    f"actor.model.model_type={model_type}",
                    "actor.model.hidden_dim=32",
                    "actor.model.num_action_chunks=2",
                    "actor.model.precision=bf16",
                    "actor.model.options={num_layers: 1, max_prompt_tokens: 32, temperature: 1.6}",
                    "algorithm.logprob_type=token_level",
                    "runner.max_steps=2",
                ),
                marks=pytest.mark.nightly,
            )
            for model_type in ("openvla", "openvla_oft")
        ),
        pytest.param(
            (
                "actor.model.model_type=flow_policy",
                "actor.model.num_action_chunks=2",
                "actor.model.options={action_horizon: 4, ensemble: true}",
                "algorithm.logprob_type=token_level",
                "runner.val_check_interval=1",
                "runner.max_steps=2",
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["passes", "openvla", "openvla_oft", "ensemble"],
)
def test_every_mode_trains(train: Train, overrides: tuple[str, ...]) -> None:
    """Two stages are those of `spanning`, gymnasium is that of `tests/golden`, and GRPO is learned by in
    `test_reaching_is_learned_in_seconds`.
    """
    run = train(*overrides)
    metrics = run.metrics
    assert [record.step for record in metrics] == [1, 2]
    assert all(value == value for record in metrics for value in record.metrics.values())
    assert metrics[-1].metrics["train/actor/grad_norm"] > 0


def test_rollouts_run_ahead_by_as_many_versions_as_allowed(train: Train) -> None:
    run = train("runner.max_staleness=2", "runner.max_steps=4", "runner.val_check_interval=2")
    assert [record.metrics["rollout/staleness"] for record in run.metrics] == [0, 1, 2, 2]
    assert [item.step for item in run.of(Evaluated)] == [0, 2, 4]


@pytest.mark.nightly
def test_evaluating_alone_trains_nothing(train: Train) -> None:
    trained = train("runner.max_steps=1", "runner.logger.experiment_name=one", "runner.val_check_interval=1")
    run = train("runner.only_eval=true", "runner.logger.experiment_name=one", "runner.resume_dir=auto")
    assert not run.of(StepFinished)
    (evaluated,) = run.of(Evaluated)
    assert evaluated.metrics["eval/return"] == trained.of(Evaluated)[-1].metrics["eval/return"]


def greedy_success(run: Run) -> float:
    """Of the evaluation at the end, in episodes that training has not seen."""
    return run.of(Evaluated)[-1].metrics["eval/success_at_end"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shipped", "steps"),
    [("embodied/pick-laptop", 12), pytest.param("embodied/pick-grpo-laptop", 20, marks=pytest.mark.nightly)],
    ids=["ppo", "grpo"],
)
def test_reaching_is_learned_in_seconds(train: Train, shipped: str, steps: int) -> None:
    short = (f"runner.max_steps={steps}", f"runner.val_check_interval={steps}", "runner.save_interval=-1")
    run = train("env.train.task=reach", "env.eval.total_num_envs=256", *short, shipped=shipped)
    assert run.metrics[0].metrics["env/success_once"] < 0.3
    assert greedy_success(run) >= 0.9


def shipped_run(train: Train, shipped: str, seed: int) -> Run:
    """As the file says, to its last step. In the beginning it cannot do it."""
    seeds = (f"env.train.seed={seed}", f"actor.seed={seed}")
    run = train(*seeds, "env.eval.total_num_envs=256", "runner.save_interval=-1", shipped=shipped)
    assert run.metrics[0].metrics["env/success_at_end"] < 0.1
    return run


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_to_pick(train: Train, seed: int) -> None:
    assert greedy_success(shipped_run(train, "embodied/pick-laptop", seed)) >= 0.9


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_to_pick(train: Train, seed: int) -> None:
    """The policy that acts goes on succeeding; what it does greedily got there too, and wavers afterwards.

    Close to perfect, a step learns from one failure or two, and nothing else says where the greedy action should be.
    """
    run = shipped_run(train, "embodied/pick-grpo-laptop", seed)
    sampled = [record.metrics["env/success_at_end"] for record in run.metrics[-10:]]
    assert sum(sampled) / len(sampled) >= 0.9
    assert max(item.metrics["eval/success_at_end"] for item in run.of(Evaluated)) >= 0.9


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_picking_is_learned_from_samples_of_older_weights(train: Train) -> None:
    run = train(
        "runner.max_staleness=1",
        "env.eval.total_num_envs=256",
        "runner.save_interval=-1",
        shipped="embodied/pick-laptop",
    )
    assert greedy_success(run) >= 0.9
    assert [record.metrics["rollout/staleness"] for record in run.metrics] == [0.0, *[1.0] * (len(run.metrics) - 1)]


# One batch a step, all samples: the order of samples, which each rank draws for itself, then makes no difference.
WHOLE = ("actor.global_batch_size=80", "algorithm.update_epoch=1", "runner.max_steps=2")
PLACES = "cluster.component_placement"


def place(**counts: int) -> tuple[str, ...]:
    """Overrides that give components so many processes, all on this machine."""
    named = [f"{PLACES}.{name}={{node_group: node, placement: '0:0-{count - 1}'}}" for name, count in counts.items()]
    return (f"~{PLACES}", *named)


def same_but_rounding(one: Run, other: Run) -> None:
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_two_actors_learn_what_one_learns(train: Train, strategy: str) -> None:
    one = train(*WHOLE)
    two = train(*WHOLE, *place(actor=2, rollout=1, env=1), f"actor.fsdp_config.sharding_strategy={strategy}")
    # Each learned, and with as many as it should.
    assert [run.of(RunStarted)[-1].components["actor"] for run in (one, two)] == [1, 2]
    assert all(run.metrics[-1].metrics["train/actor/grad_norm"] > 0 for run in (one, two))
    same_but_rounding(one, two)


@pytest.mark.nightly
def test_several_of_each_kind(train: Train) -> None:
    run = train(*place(actor=2, rollout=2, env=2), "rollout.pipeline_stage_num=2", "runner.val_check_interval=3")
    assert [record.step for record in run.metrics] == [1, 2, 3]
    assert "eval/return" in run.metrics[-1].metrics


@pytest.mark.nightly
def test_actors_share_the_steps_of_one_environment(train: Train) -> None:
    alone = ("env.train.total_num_envs=1", "actor.global_batch_size=10")
    one = train(*WHOLE, *alone)
    two = train(*WHOLE, *alone, *place(actor=2, rollout=1, env=1))
    assert two.metrics[-1].metrics["train/actor/grad_norm"] > 0
    assert two.metrics[-1].metrics["rollout/reward"] == pytest.approx(one.metrics[-1].metrics["rollout/reward"])
    same_but_rounding(one, two)


@pytest.mark.nightly
def test_documented_file_trains_without_its_gpus(train: Train) -> None:
    page = (Path(__file__).parents[4] / "docs" / "config.md").read_text(encoding="utf-8")
    described = yaml.YAML(typ="safe").load(page.split("```yaml\n")[1].split("```")[0])
    assert list(described["cluster"]["component_placement"]) == ["actor", "rollout", "env"]
    # 8 processes that train, 4 that act, one arm.
    run = train(*place(actor=8, rollout=4, env=1), "env.train.total_num_envs=1", "actor.global_batch_size=null")
    assert run.of(RunStarted)[-1].components == {"actor": 8, "rollout": 4, "env": 1}
    assert [record.step for record in run.metrics][-1] == 3
    assert run.metrics[-1].metrics["train/actor/grad_norm"] > 0


STEPS = ("runner.max_steps=4", "runner.save_interval=1")
DRIVER = """
import sys
from recipes.embodied.program import program
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder

job = load_job("embodied/pick-laptop", sys.argv[1:], environ={})
job.raise_if_bad()
folder = RunFolder.create(job.config.runner, "embodied")
print("folder", folder.path, flush=True)

def tell(event):
    print(type(event).__name__, getattr(event, "phase", ""), getattr(event, "step", ""), flush=True)

program(job, folder, tell)
folder.end("finished")
"""


def drive(log_path: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [*SMALL, *STEPS, f"runner.logger.log_path={log_path}", *overrides]
    return subprocess.Popen([sys.executable, "-c", DRIVER, *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "moment",
    ["StepFinished  1", "PhaseStarted save_checkpoint 2", "PhaseStarted actor_training 3", "CheckpointSaved  3"],
)
@pytest.mark.parametrize("episode", [10, 25], ids=["whole", "spanning"])
def test_killed_and_continued(train: Train, tmp_path: Path, moment: str, episode: int) -> None:
    """With episodes that end with their pass, and with such as span two or three."""
    long = f"env.train.max_episode_steps={episode}"
    whole = train(*STEPS, long)
    with drive(tmp_path / "killed", long) as killed:
        assert killed.stdout is not None
        assert any(line.strip() == moment for line in killed.stdout)
        os.kill(killed.pid, signal.SIGKILL)
    with drive(tmp_path / "killed", long, "runner.resume_dir=auto") as again:
        output, _ = again.communicate()
    assert again.returncode == 0
    assert "RunFinished" in output
    folder = Path(output.splitlines()[0].removeprefix("folder "))
    assert whole.ends_like(folder / "checkpoints" / "global_step_4")


def check_is_alike(run: Run, undisturbed: Run) -> None:
    """The weights after step 3 are those of the run that nothing happened to, and each step was finished once."""
    assert [item.step for item in run.of(StepFinished)] == [1, 2, 3]
    check_ends_alike(run, undisturbed)


def check_ends_alike(run: Run, undisturbed: Run) -> None:
    """The weights after step 3 are those of the run that nothing happened to, whatever was done again."""
    assert [record.step for record in run.metrics] == [1, 2, 3]
    (there,) = [item.path for item in undisturbed.folder.checkpoints.complete() if item.step == 3]
    assert run.ends_like(there)


@pytest.mark.parametrize("component", ["env", pytest.param("rollout", marks=pytest.mark.nightly)])
def test_a_killed_worker_alone_is_started_again(train: Train, spanning: Run, component: str) -> None:
    """Episodes span passes, so that those of the environments that die with it have to be continued."""
    run = train(*SPANNING, "runner.save_interval=3", during=Killer(component, 3, "generate_rollouts"))
    assert not run.of(RunRestarted)
    (again,) = run.of(WorkersRelaunched)
    assert (again.step, again.restart, again.max_restarts) == (2, 1, 3)
    assert again.repeated == "the rollout of step 3"
    assert "Group:0` on node 0 (127.0.0.1) died" in again.reason
    (bundle,), faults = read_bundles(run.folder.path)
    assert (bundle.content.failures[0].died, faults) == (True, [])
    assert again.details[-1] == f"evidence: evidence/{bundle.path.name}"
    recent = (bundle.path / "recent.txt").read_text()
    assert "== driver\n" in recent
    assert "method `" in recent
    check_is_alike(run, spanning)


@pytest.mark.nightly
def test_a_killed_actor_costs_a_restart_and_changes_nothing(train: Train, spanning: Run) -> None:
    run = train(*SPANNING, "runner.save_interval=1", during=Killer("actor", 3, "generate_rollouts"))
    (restart,) = run.of(RunRestarted)
    assert (restart.step, restart.restart, restart.max_restarts) == (2, 1, 3)
    assert "ActorGroup:0" in restart.reason
    assert "died" in restart.reason
    (bundle,), faults = read_bundles(run.folder.path)
    first = bundle.content.failures[0]
    # The group stands for the component, which only `rlinf train` names.
    assert (first.name, first.component, first.died, faults) == ("ActorGroup:0", "ActorGroup", True, [])
    # Nothing is said of memory, and of the signal nothing where the kernel does not keep it.
    assert (first.signal, first.out_of_memory) == ("SIGKILL" if KEEPS_ENDS else None, None)
    assert restart.details[-1] == f"evidence: evidence/{bundle.path.name}"
    names = {str(path.relative_to(bundle.path)) for path in bundle.path.rglob("*") if path.is_file()}
    assert {"waits.json", "stacks.txt", "memory.json", "versions.json", "config.yaml", "in_flight.json"} <= names
    assert any(name.startswith("ray/") for name in names)
    assert len(run.of(RunStarted)) == 1
    check_is_alike(run, spanning)


@pytest.mark.nightly
def test_killed_actor_goes_back_to_the_snapshot(train: Train, spanning: Run) -> None:
    snapshots = ("runner.save_interval=3", "runner.snapshot_interval=0.01s")
    run = train(*SPANNING, *snapshots, during=Killer("actor", 3, "generate_rollouts"))
    (restart,) = run.of(RunRestarted)
    assert restart.step in [saved.step for saved in run.of(CheckpointSaved) if saved.snapshot]
    assert [saved.step for saved in run.of(CheckpointSaved) if not saved.snapshot] == [3]
    assert [checkpoint.step for checkpoint in run.folder.checkpoints.complete()] == [3]
    check_ends_alike(run, spanning)


@pytest.mark.nightly
def test_without_a_checkpoint_it_begins_again(train: Train) -> None:
    whole = train()
    run = train("runner.save_interval=-1", "runner.save_interval=3", during=Killer("actor", 2, "actor_training"))
    (restart,) = run.of(RunRestarted)
    assert restart.step == 0
    assert [record.step for record in run.metrics] == [1, 2, 3]
    assert run.ends_like(whole)


class MidStep(Killer):
    """Kills a worker so many seconds after a rollout of every step has begun."""

    def __init__(self, component: str, seconds: float) -> None:
        super().__init__(component, 0, "generate_rollouts", times=3)
        self.seconds = seconds

    def __call__(self, event: Event, runner: Runner | None) -> None:
        if isinstance(event, PhaseStarted) and event.step > self.step and event.phase == self.phase:
            self.step = event.step
            threading.Timer(self.seconds, super().__call__, (event, runner)).start()


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("component", ["env", "rollout"])
def test_whenever_a_worker_dies_nothing_changes(train: Train, spanning: Run, component: str, seconds: float) -> None:
    """Two of each, so that some are in the midst of what they do when a peer dies."""
    two = "{node_group: node, placement: '0:0-1'}"
    ranks = [f"cluster.component_placement.{name}={two}" for name in ("env", "rollout")]
    overrides = (*SPANNING, "~cluster.component_placement", "cluster.component_placement.actor={placement: 0}", *ranks)
    whole = train(*overrides, "runner.save_interval=3")
    run = train(*overrides, "runner.save_interval=3", during=MidStep(component, seconds))
    assert not run.of(RunRestarted)
    assert run.of(WorkersRelaunched)
    assert [record.step for record in run.metrics] == [1, 2, 3]
    assert run.ends_like(whole)


@pytest.mark.nightly
def test_there_is_an_end_of_restarts(train: Train) -> None:
    with pytest.raises(WorkerGroupError, match="died"):
        train("runner.max_restarts=1", during=Killer("actor", 1, "generate_rollouts", times=2))
