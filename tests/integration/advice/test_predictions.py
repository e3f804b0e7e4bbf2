"""Predicted against measured steps on stand-in accelerators, advice followed, and two jobs on one accelerator.

Work on a stand-in is a sleep while its lock is held. A sleep takes about as long on a busy machine, so that the flow of
the model is what is tested, and not the machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.golden.command_line import REPOSITORY
from tests.rlinf_command import output_of
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

STAND_INS = Path(__file__).parent / "stand_ins"
# Seconds of a call, fixed and for each row: environments, answers, tokens, or transitions.
WORK = {
    "env": {"fix": 0.035, "slope": 0.0021},
    "policy": {"fix": 0.028, "slope": 0.0014},
    "train": {"fix": 0.035, "slope": 0.0028},
    "draw": {"fix": 0.025, "slope": 0.0008},
    "learn": {"fix": 0.025, "slope": 0.0018},
    "update": {"fix": 0.008, "slope": 0.0001},
    "longest": 96,
}
CLUSTER = """
  num_nodes: 1
  node_groups:
    - {label: gpu, node_ranks: 0, accelerators: {model: STAND, per_node: 4}}
"""
EMBODIED = f"""
recipe: embodied
cluster: {CLUSTER}
  component_placement: {{actor: 0, rollout: 0, env: 0}}
env:
  train:
    {{env_type: "stand_in_job:StandInEnv", total_num_envs: 64, max_episode_steps: 8, max_steps_per_rollout_epoch: 8}}
actor:
  model: {{model_type: "stand_in_job:StandInPolicy", hidden_dim: 8}}
  global_batch_size: 512
  micro_batch_size: 16
  fsdp_config: {{sharding_strategy: no_shard}}
algorithm: {{update_epoch: 1}}
runner: {{max_steps: 7, val_check_interval: -1, save_interval: -1}}
"""
MATH = f"""
recipe: math
cluster: {CLUSTER}
  component_placement: {{actor: 0, rollout: 0, reward: {{node_group: node, placement: 0}}}}
data: {{type: sums, rollout_batch_size: 16, max_prompt_length: 24}}
rollout: {{check_logprobs: "off", sampling_params: {{temperature: 1.0, max_new_tokens: 96}}}}
reward: {{reward_type: "stand_in_job:reward"}}
algorithm: {{group_size: 4, n_minibatches: 1, kl_beta: 0.0, entropy_bonus: 1.0e-6}}
actor:
  warm_start: {{steps: 1}}
  model: {{hidden_dim: 32, num_layers: 1}}
  max_tokens_per_micro_batch: 512
  optim: {{lr: 1.0e-6}}
  fsdp_config: {{sharding_strategy: no_shard}}
runner: {{save_format: dcp, seq_length: 128, max_steps: 7, val_check_interval: -1, save_interval: -1}}
"""
AGENT = f"""
recipe: agent
cluster: {CLUSTER}
  component_placement: {{actor: 0, rollout: 0, "reward,agent": {{node_group: node, placement: 0}}}}
data: {{type: calculations, rollout_batch_size: 8, max_prompt_length: 24}}
agent: {{run: "stand_in_agent:converse", tools: ["stand_in_agent:look_up"], max_turns: 4}}
rollout: {{check_logprobs: "off", sampling_params: {{temperature: 1.0, max_new_tokens: 40}}}}
reward: {{reward_type: "stand_in_job:reward"}}
algorithm: {{group_size: 4, n_minibatches: 1, kl_beta: 0.0, entropy_bonus: 1.0e-6}}
actor:
  warm_start: {{steps: 1}}
  model: {{hidden_dim: 32, num_layers: 1}}
  max_tokens_per_micro_batch: 512
  optim: {{lr: 1.0e-6}}
  fsdp_config: {{sharding_strategy: no_shard}}
runner: {{save_format: dcp, seq_length: 512, max_steps: 7, val_check_interval: -1, save_interval: -1}}
"""
OFF_POLICY = f"""
recipe: embodied
cluster: {CLUSTER}
  component_placement: {{actor: 0, rollout: 0, env: 0}}
env:
  train:
    {{env_type: "stand_in_job:StandInEnv", total_num_envs: 16, max_episode_steps: 16, max_steps_per_rollout_epoch: 16}}
actor: {{model: {{model_type: squashed_policy, hidden_dim: 64}}, global_batch_size: 128}}
algorithm: {{loss_type: sac, update_to_data: 0.1, learning_starts: 1, replay: {{capacity: 10000}}}}
runner: {{max_steps: 8, val_check_interval: -1, save_interval: -1}}
"""
# Placements by components, with stages and staleness; runs of the first two are what advice is fitted to.
OF_EMBODIED = [
    ({"env": "0", "rollout": "0", "actor": "0"}, 1, 0),
    ({"env": "0-1", "rollout": "0-1", "actor": "0-1"}, 1, 0),
    ({"env": "0", "rollout": "1", "actor": "2"}, 2, 1),
    ({"env": "0", "rollout": "1", "actor": "0-1"}, 2, 0),
    ({"env": "0-3", "rollout": "0-3", "actor": "0-3"}, 1, 0),
]
OF_MATH = [
    ({"rollout": "0", "actor": "0"}, 1, 0),
    ({"rollout": "0-1", "actor": "0-1"}, 1, 0),
    ({"rollout": "0", "actor": "1"}, 1, 1),
    ({"rollout": "0", "actor": "0-1"}, 1, 0),
    ({"rollout": "0-1", "actor": "2"}, 1, 1),
    ({"rollout": "0", "actor": "1"}, 1, 0),
    ({"rollout": "0", "actor": "1"}, 1, 2),
    ({"rollout": "0", "actor": "1-2"}, 1, 1),
]
OF_AGENT = [
    ({"rollout": "0", "actor": "0"}, 1, 0),
    ({"rollout": "0-1", "actor": "0-1"}, 1, 0),
    ({"rollout": "0", "actor": "1"}, 1, 1),
    ({"rollout": "0", "actor": "0-1"}, 1, 0),
    ({"rollout": "0-1", "actor": "2"}, 1, 1),
]
MOST_OFF = 0.10
TIE = 0.03


def rlinf(folder: Path, *words: str, work: Any = WORK, **variables: str) -> str:
    environ = {name: os.environ[name] for name in ("PATH", "HOME")} | variables
    environ |= {"PYTHONPATH": f"{STAND_INS}:{REPOSITORY}", "RLINF_REPORT": "0", "RLINF_ADDRESS": "local"}
    environ |= {"STAND_IN_WORK": json.dumps(work), "STAND_IN_LOCKS": str(folder)}
    return output_of(sys.executable, "-m", "rlinf_cli", *words, cwd=folder, env=environ)


def overrides_of(place: dict[str, Any], stages: int, ahead: int) -> list[str]:
    words = [f"cluster.component_placement.{name}={json.dumps(ranks)}" for name, ranks in place.items()]
    words += [f"rollout.pipeline_stage_num={stages}"] if stages > 1 else []
    # Steps that run ahead are long and short in turn: the mean of ten is off by up to a twelfth.
    return [*words, f"runner.max_staleness={ahead}", *([f"runner.max_steps={7 + 16 * ahead}"] if ahead else [])]


def measured(folder: Path, name: str, words: list[str], *, job: str = "job.yaml", **options: Any) -> tuple[str, float]:
    """Run a job; return its name, and the mean of its steps but for the first ones and the last."""
    rlinf(folder, "train", job, *words, *recorded_as("runs", name), **options)
    return step_of(folder / "runs", name)


def recorded_as(runs: str | Path, name: str) -> list[str]:
    return [f"runner.logger.log_path={runs}", f"runner.logger.experiment_name={name}"]


def step_of(runs: Path, name: str) -> tuple[str, float]:
    """Return the folder of a run, and the mean of its steps but for the first ones and the last."""
    (run,) = runs.glob(f"{name}-2*")
    steps: list[Any] = [json.loads(line)["metrics"]["time/step"] for line in (run / "metrics.jsonl").open()]
    return str(run), mean(steps[2:-1])


def check_predictions(predicted: Sequence[float], seconds: Sequence[float], names: Sequence[str]) -> None:
    """Each within `MOST_OFF` of what was measured, and all in its order but for ties."""
    rows = zip(names, predicted, seconds, strict=True)
    table = [f"{name}: {p:.2f} predicted, {m:.2f} measured, {p / m - 1:+.1%}" for name, p, m in rows]
    print("\n".join(table))
    assert all(abs(p / m - 1) <= MOST_OFF for p, m in zip(predicted, seconds, strict=True)), table
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if seconds[a] < seconds[b] * (1 - TIE)]
    assert all(predicted[a] < predicted[b] * (1 + TIE) for a, b in pairs), table


@pytest.mark.parametrize(
    ("job", "placements"),
    [(EMBODIED, OF_EMBODIED), (MATH, OF_MATH), (AGENT, OF_AGENT)],
    ids=["embodied", "math", "agent"],
)
def test_steps_are_predicted_and_in_the_right_order(tmp_path: Path, job: str, placements: Any) -> None:
    (tmp_path / "job.yaml").write_text(job)
    words = [overrides_of(*placement) for placement in placements]
    runs, seconds = zip(*(measured(tmp_path, f"p{at}", words[at]) for at in range(len(words))), strict=True)
    asked = ["inspect", "placement", "job.yaml", "--advise", f"{runs[0]},{runs[1]}", "--json"]
    advice = [json.loads(rlinf(tmp_path, *asked, *placed)) for placed in words]
    check_predictions([made["now"]["seconds"] for made in advice], seconds, list(map(str, placements)))
    # Without work, in the placement in which rollouts run ahead.
    said = json.loads(rlinf(tmp_path, "train", "job.yaml", *runs[:2], "--rehearse", "--json", *words[2]))
    rehearsed = f"{said['rehearsed']:.2f} rehearsed, {seconds[2]:.2f} measured"
    print(rehearsed)
    assert abs(said["rehearsed"] / seconds[2] - 1) <= MOST_OFF, rehearsed


def test_the_file_that_is_written_makes_the_job_faster(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(EMBODIED)
    (one, before), (two, _) = (measured(tmp_path, f"p{at}", overrides_of(*OF_EMBODIED[at])) for at in range(2))
    rlinf(tmp_path, "inspect", "placement", "job.yaml", "--advise", f"{one},{two}")
    text = (tmp_path / "advice.yaml").read_text()
    (tmp_path / "job.yaml").rename(tmp_path / "old.yaml")
    (tmp_path / "job.yaml").write_text(text.replace("job.yaml", "old.yaml"))
    _, after = measured(tmp_path, "advised", [])
    assert before / after >= 1.5, f"{before:.2f} before, {after:.2f} after"


def test_a_job_that_learns_off_policy_is_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(OFF_POLICY)
    one, _ = measured(tmp_path, "one", [])
    words = overrides_of({"env": "0-1", "rollout": "2", "actor": "3"}, 1, 0)
    two, seconds = measured(tmp_path, "two", words)
    said = json.loads(rlinf(tmp_path, "train", "job.yaml", one, two, "--rehearse", "--json", *words))
    line = f"{said['predicted']:.2f} predicted, {said['rehearsed']:.2f} rehearsed, {seconds:.2f} measured"
    print(line)
    assert abs(said["rehearsed"] / seconds - 1) <= MOST_OFF, line


# A shipped job of 8 accelerators with stand-ins in the place of simulator and model, and fewer environments.
SHIPPED = "embodied/libero-disaggregated-8gpu"
INSTEAD = [
    "env.train.env_type=stand_in_job:StandInEnv",
    "env.train.task=",
    "~env.train.options",
    "~env.train.num_processes",
    "env.train.total_num_envs=64",
    "env.train.max_episode_steps=64",
    "env.train.max_steps_per_rollout_epoch=64",
    "actor.model.model_type=stand_in_job:StandInPolicy",
    "actor.model.model_path=",
    "~actor.model.options",
    "actor.model.precision=fp32",
    "actor.global_batch_size=512",
    "actor.fsdp_config.gradient_checkpointing=false",
    "runner.val_check_interval=-1",
    "runner.save_interval=-1",
    "runner.max_steps=6",
]
# A simulator that takes long for each environment, in each of the eight steps of an action chunk.
SLOW = {**WORK, "env": {"fix": 0.0044, "slope": 0.0025}}
DEVICES = {"STAND_IN_DEVICES": "8", "RLINF_LIBERO_PYTHON": sys.executable}


def smaller(environments: int, devices: int) -> str:
    """Return the embodied job with fewer environments and accelerators."""
    job = EMBODIED.replace("per_node: 4", f"per_node: {devices}").replace(
        "batch_size: 512", f"batch_size: {8 * environments}"
    )
    return job.replace("total_num_envs: 64", f"total_num_envs: {environments}")


# 48 environments on three accelerators.
FEWER = smaller(48, 3)
THREE: Any = {"STAND_IN_DEVICES": "3"}
# What RLinf's planner chooses for them by its rule, with times in the proportions of `WORK`.
THEIRS = ({"env": "0", "rollout": "1-2", "actor": "0-2"}, 2, 0)

# 32 environments, whose simulator runs on the CPU, beside two accelerators; a second worker shows a second size.
BESIDE = smaller(32, 2)
TWO: Any = {"STAND_IN_DEVICES": "2"}
ON_CPU, SECOND_SIZE = ({"node_group": "node", "placement": f"0:{workers}"} for workers in ("0", "0-1"))
# Seconds of a step of an environment, and of a sample of training.
CHEAP, DEAR, TRAINED = 0.0002, 0.01, 0.0056


def advice_on(folder: Path, job: str, runs: list[str], *words: str, **options: Any) -> Any:
    return json.loads(
        rlinf(folder, "inspect", "placement", job, "--advise", ",".join(runs), "--json", *words, **options)
    )


def test_a_bad_placement_of_a_shipped_job_becomes_faster(tmp_path: Path) -> None:
    options: dict[str, Any] = {"work": SLOW, **DEVICES}
    other = ["cluster.component_placement.env={node_group: libero, placement: 0-3}", "runner.max_staleness=0"]
    now, before = measured(tmp_path, "now", INSTEAD, job=SHIPPED, **options)
    size, _ = measured(tmp_path, "size", [*INSTEAD, *other], job=SHIPPED, **options)
    made = advice_on(tmp_path, SHIPPED, [now, size], *INSTEAD, **options)
    changes = [f"{key}={json.dumps(value)}" for key, value in made["best"][0]["changes"].items()]
    _, after = measured(tmp_path, "advised", [*INSTEAD, *changes], job=SHIPPED, **options)
    line = f"{SHIPPED}: {before:.2f} before, {after:.2f} after {changes}, predicted {made['best'][0]['seconds']:.2f}"
    print(line)
    assert made["change_advised"]
    assert before / after >= 1.5, line


def test_nothing_is_to_be_changed_and_another_planner_is_slower(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FEWER)
    one, single = measured(tmp_path, "one", overrides_of({"env": "0", "rollout": "0", "actor": "0"}, 1, 0), **THREE)
    ours = overrides_of({"env": "0-2", "rollout": "0-2", "actor": "0-2"}, 1, 0)
    two, seconds = measured(tmp_path, "ours", ours, **THREE)
    _, theirs = measured(tmp_path, "theirs", overrides_of(*THEIRS), **THREE)
    said = rlinf(tmp_path, "inspect", "placement", "job.yaml", "--advise", f"{one},{two}", *ours, **THREE)
    made = advice_on(tmp_path, "job.yaml", [one, two], *overrides_of(*THEIRS), **THREE)
    line = f"ours {made['best'][0]['seconds']:.2f} predicted, {seconds:.2f} measured;"
    line += f" theirs {made['now']['seconds']:.2f} predicted, {theirs:.2f} measured; on one {single:.2f} measured"
    print(line)
    assert "nothing to change: no legal placement is faster" in said
    assert min(theirs, single) > seconds * (1 + TIE), line


def test_the_advised_mode_follows_the_cost_of_a_simulator(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(BESIDE)
    train, made, modes = {"fix": 0.035, "slope": TRAINED}, list[Any](), list[list[str]]()
    costs: list[Any] = [
        {**TWO, "work": {**WORK, "train": train, "env": {"fix": 0.0, "slope": cost}}} for cost in (CHEAP, DEAR)
    ]
    now = overrides_of({"env": ON_CPU, "rollout": "0-1", "actor": "0-1"}, 1, 0)
    other = overrides_of({"env": SECOND_SIZE, "rollout": "0", "actor": "0"}, 1, 0)
    for at, cost in enumerate(costs):
        runs = [measured(tmp_path, f"{name}{at}", words, **cost)[0] for name, words in (("now", now), ("other", other))]
        made.append(advice_on(tmp_path, "job.yaml", runs, "--staleness", "1", *now, **cost))
        changes = made[at]["best"][0]["changes"] if made[at]["change_advised"] else {}
        modes.append([*now, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
    seconds = [
        [measured(tmp_path, f"mode{mode}{at}", words, **cost)[1] for mode, words in enumerate(modes)]
        for at, cost in enumerate(costs)
    ]
    line = "; ".join(
        f"{name}: as it is {made[at]['now']['seconds']:.2f} predicted, best {made[at]['best'][0]['seconds']:.2f},"
        f" {made[at]['best'][0]['changes']}, measured in the modes advised {both[0]:.2f} and {both[1]:.2f}"
        for at, (name, both) in enumerate(zip(("cheap", "dear"), seconds, strict=True))
    )
    print(line)
    # In turns on both accelerators, and ahead of training on one of them.
    assert modes[0] == now, line
    assert "runner.max_staleness=1" in modes[1], line
    assert seconds[0][0] < seconds[0][1] * (1 - TIE), line
    assert seconds[1][1] < seconds[1][0] * (1 - TIE), line


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(tmp_path: Path) -> Generator[Run]:
    """Start `rlinf train` of a small job, whose output goes to a file of its name."""
    small = EMBODIED.replace("total_num_envs: 64", "total_num_envs: 16").replace("batch_size: 512", "batch_size: 128")
    (tmp_path / "job.yaml").write_text(small)
    (tmp_path / "locks").mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(REPOSITORY)]),
        "STAND_IN_LOCKS": str(tmp_path / "locks"),
        "STAND_IN_WORK": json.dumps(WORK),
        # Other tests have devices of this name, too.
        "STAND_IN_VENDOR": f"STAND{secrets.token_hex(4)}",
        "RLINF_CLAIMS": "wait",
        "RLINF_ADDRESS": "local",
    }
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "rlinf_cli", "train", "job.yaml", *arguments]
        with (tmp_path / name).open("w") as output:
            process = subprocess.Popen(
                [*argv, f"runner.logger.experiment_name={name}"],
                cwd=tmp_path,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()


def test_a_second_job_waits_ends_or_shares(train: Run, tmp_path: Path) -> None:
    def says(name: str, words: str) -> None:
        until(lambda: words in (tmp_path / name).read_text(), f"`{words}` of {name}", 600, 0.2)

    first = train("first", "runner.max_steps=-1")
    says("first", "step 1")
    assert train("ends", "--no-wait").wait() == 3
    says("ends", "another job holds accelerator 0 of node 0: runs/first-")
    train("shares", "--share", "runner.max_steps=1")
    says("shares", "shared with other jobs: accelerator 0 of node 0: runs/first-")
    says("shares", "finished")
    # A signal ends a wait, and nothing was started by it.
    stopped = train("stopped")
    says("stopped", "waiting for accelerator 0 of node 0: runs/first-")
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait() == 130
    waits = train("waits", "runner.max_steps=1")
    says("waits", "waiting for accelerator 0 of node 0: runs/first-")
    first.kill()
    assert waits.wait() == 0
    says("waits", "finished")
