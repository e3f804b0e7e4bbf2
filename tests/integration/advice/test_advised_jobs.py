"""Advice followed, on stand-in accelerators: what it changes, what it leaves, and beside another planner's choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.advice.test_predictions import EMBODIED, TIE, WORK, measured, overrides_of, rlinf

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

# A shipped job of 8 accelerators with stand-ins in the place of simulator and model, and fewer environments.
SHIPPED = "disaggregated"
STAND_INS = [
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
    now, before = measured(tmp_path, "now", STAND_INS, job=SHIPPED, **options)
    size, _ = measured(tmp_path, "size", [*STAND_INS, *other], job=SHIPPED, **options)
    made = advice_on(tmp_path, SHIPPED, [now, size], *STAND_INS, **options)
    changes = [f"{key}={json.dumps(value)}" for key, value in made["best"][0]["changes"].items()]
    _, after = measured(tmp_path, "advised", [*STAND_INS, *changes], job=SHIPPED, **options)
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
