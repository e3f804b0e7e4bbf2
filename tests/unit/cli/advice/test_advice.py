"""`rlinf inspect placement --advise`: from the records of runs to a file that `rlinf train` takes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.sections.group_rules import Site
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.typed import Cli, text_file

JOB = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,env: 0
  node_groups:
    - {{label: gpu, node_ranks: 0, accelerators: {{model: {model}, per_node: 4{memory}}}}}
env: {{train: {{env_type: franka_kin, max_episode_steps: 8, total_num_envs: 64, max_steps_per_rollout_epoch: 8}}}}
actor: {{global_batch_size: 512, micro_batch_size: 16}}
algorithm: {{update_epoch: 1}}
runner: {{max_steps: 5, val_check_interval: -1, save_interval: -1}}
"""
PLACED = "actor,rollout: {node_group: gpu, placement: 0}\n    env: {node_group: sim, placement: 0}"
# Seconds of a call: fixed, and for each row.
LINES = {
    "env/step": ("env", 0.07, 0.0042),
    "rollout/policy": ("rollout", 0.056, 0.0028),
    "rollout/values": ("rollout", 0.056, 0.0028),
    "training/update": ("actor", 0.02, 0.01),
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return text_file(tmp_path / "job.yaml", JOB.format(model="A800", memory=""))


def record_run(job: Path, name: str, ranks: str, *, processes: int, load: float = 0.5, lines: Any = None) -> Path:
    """Record a run in which all components were on the same accelerators, in turns."""
    overrides = [f"cluster.component_placement.{part}={ranks}" for part in ("actor", "rollout", "env") if ranks]
    loaded = load_job(str(job), overrides)
    loaded.raise_if_bad()
    settings = RunnerConfig.model_validate({"logger": {"log_path": str(job.parent / "runs"), "experiment_name": name}})
    folder = RunFolder.create(settings, "embodied")
    folder.write_config(loaded)
    lines = LINES if lines is None else lines
    sizes = {phase: (512 if phase == "training/update" else 64) // processes for phase in lines}
    times = {phase: fix + slope * sizes[phase] for phase, (_, fix, slope) in lines.items()}
    rolled = 8 * (times.get("env/step", 0) + times.get("rollout/policy", 0)) + times.get("rollout/values", 0)
    trained = times.get("training/update", 0)
    step = {"time/generate_rollouts": rolled, "time/actor_training": trained, "time/sync_weights": 0.01}
    step["time/step"] = sum(step.values()) + 0.05
    written = [{"step": number, "time": 0.0, "metrics": step} for number in range(1, 7)]
    folder.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in written))
    rows: list[dict[str, Any]] = []
    for phase, seconds in times.items():
        called = {"component": lines[phase][0], "phase": phase, "processes": processes, "rows": sizes[phase]}
        total = 40 * seconds
        rows.append({**called, "calls": 40, "seconds": total, "slowest": total, "quantiles": [seconds] * 21})
    profile = {"schema": "rlinf.profile/1", "cpus": 4, "load": load, "rows": rows}
    (folder.path / "profile.json").write_text(json.dumps(profile))
    return folder.path


def both(job: Path) -> str:
    return f"{record_run(job, 'one', '0', processes=1)},{record_run(job, 'two', '0-1', processes=2)}"


def advice(cli: Cli, job: Path, runs: str, *words: str) -> dict[str, Any]:
    return json.loads(cli("inspect", "placement", job, "--advise", runs, "--json", *words).out)


def test_a_better_placement_becomes_a_file_that_extends_the_job(cli: Cli, job: Path) -> None:
    runs = both(job)
    made = advice(cli, job, runs)
    best, now = made["best"][0], made["now"]
    assert made["proven"]
    assert made["change_advised"]
    assert best["components"]["env"] == {"group": "cluster", "ranks": "0-3"}
    assert now["seconds"] / best["seconds"] > 1.5
    # Today is predicted as it was measured.
    measured = 8 * (0.07 + 0.0042 * 64 + 0.056 + 0.0028 * 64) + 0.056 + 0.0028 * 64 + 0.02 + 5.12 + 0.06
    assert now["seconds"] == pytest.approx(measured, rel=0.01)
    assert now["low"] < measured < now["high"]
    changed = load_job("advice.yaml")
    changed.raise_if_bad()
    assert changed.world_sizes == {"actor": 4, "rollout": 4, "env": 4}
    text = cli("inspect", "placement", job, "--advise", runs).out
    assert "wrote advice.yaml: `rlinf train advice.yaml`" in text
    # Staleness above the file's is never proposed unasked.
    assert all(judged["max_staleness"] == 0 for judged in made["best"])
    assert any(judged["max_staleness"] for judged in advice(cli, job, runs, "--staleness", "1")["best"])


@pytest.mark.parametrize(
    "word", ["cluster.component_placement.env=0", "cluster.component_placement.env={placement: 0}"]
)
def test_overrides_given_are_in_the_file_too(cli: Cli, job: Path, word: str) -> None:
    assert advice(cli, job, both(job), word, "runner.max_steps=9")["patch"] == "advice.yaml"
    changed = load_job("advice.yaml")
    config: Any = changed.config
    assert (config.runner.max_steps, changed.world_sizes["env"]) == (9, 4)


@pytest.mark.parametrize(
    "words",
    [
        ["~runner.save_interval"],
        ["cluster.component_placement={actor: 0, rollout: 0, env: 0}"],
        ["runner.max_steps=9", "runner={trace: true}"],
    ],
)
def test_what_no_file_can_have_is_said_beside_the_advice(cli: Cli, job: Path, words: list[str]) -> None:
    ended = cli("inspect", "placement", job, "--advise", both(job), *words)
    assert ended.code == 0
    assert "as fast as now" in ended.out
    assert "no file was written" in ended.err
    assert not Path("advice.yaml").exists()


def test_nothing_is_changed_where_nothing_is_faster(cli: Cli, job: Path) -> None:
    runs = both(job)
    words = [f"cluster.component_placement.{part}=0-3" for part in ("actor", "rollout", "env")]
    made = advice(cli, job, runs, *words)
    assert (made["change_advised"], made["patch"]) == (False, None)
    assert not Path("advice.yaml").exists()
    assert "nothing to change" in cli("inspect", "placement", job, "--advise", runs, *words).out


def test_one_size_gives_an_interval_and_says_how_to_decide(cli: Cli, job: Path) -> None:
    run = str(record_run(job, "one", "0", processes=1, load=9.0))
    made = advice(cli, job, run)
    best = made["best"][0]
    assert "env/step on A800" in made["one_size"]
    assert best["high"] / best["low"] > 1.5
    text = cli("inspect", "placement", job, "--advise", run).out
    assert "one size was seen of" in text
    assert "busy machine: load 9 on 4 processors" in text
    assert "rows of env/step (seen: 64)" in text


@pytest.mark.parametrize("whose", ["host", "accelerator"])
def test_memory_that_nodes_declare_is_a_hard_limit(cli: Cli, job: Path, whose: str) -> None:
    runs = both(job)
    text = JOB.format(model="A800", memory=", memory_gib: 1.0e-9" if whose == "accelerator" else "")
    job.write_text(text.replace("label: gpu,", "label: gpu, memory_gib: 1.0e-9,") if whose == "host" else text)
    made = advice(cli, job, runs)
    assert made["best"] == []
    assert made["unfit"] == made["legal"] > 0


def test_a_component_never_seen_on_an_accelerator_is_refused(cli: Cli, job: Path) -> None:
    runs = both(job)
    job.write_text(JOB.format(model="H20", memory=""))
    ended = cli("inspect", "placement", job, "--advise", runs)
    assert "`env` on H20 was never seen by these runs" in ended.err
    assert "`env/step` was recorded on: A800" in ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--advise", "nowhere"), "there is no run `nowhere`"),
        (("--advise", "RUN", "cluster.component_placement.env=\"0,2\""), "is not on one range of accelerators"),
        (("--advise", "RUN", "--patch", "other.yaml"), "the advice is not written over another file"),
    ],
)  # fmt: skip
def test_what_cannot_be_advised_on_is_said(cli: Cli, job: Path, words: tuple[str, ...], message: str) -> None:
    Path("other.yaml").write_text("recipe: embodied\n")
    runs = both(job)
    ended = cli("inspect", "placement", job, *(runs if word == "RUN" else word for word in words))
    assert ended.code
    assert message in ended.err


@pytest.mark.parametrize("patch", ["advice.yaml", "link.yaml", "below.yaml", None])
def test_no_file_of_the_job_is_written_over(cli: Cli, job: Path, patch: str | None) -> None:
    # An advice that is asked about, and one that it extends.
    runs = both(job)
    marked = "# Made by `rlinf inspect placement --advise`\n"
    below, asked = Path("below.yaml"), Path("advice.yaml")
    below.write_text(f"{marked}extends: job.yaml\n")
    asked.write_text(f"{marked}extends: below.yaml\n")
    Path("link.yaml").symlink_to(asked)
    before = below.read_text(), asked.read_text()
    ended = cli("inspect", "placement", asked, "--advise", runs, *(["--patch", patch] if patch else []))
    assert (ended.code, "is part of the configuration" in ended.err) == (2, True)
    assert (below.read_text(), asked.read_text(), Path("link.yaml").is_symlink()) == (*before, True)


def test_a_patch_is_replaced_as_a_whole(cli: Cli, job: Path) -> None:
    runs = both(job)
    advice(cli, job, runs)
    first = Path("advice.yaml").read_text()
    with Path("advice.yaml").open() as reader:
        advice(cli, job, runs, "runner.max_steps=9")
        assert reader.read() == first != Path("advice.yaml").read_text()


@pytest.mark.parametrize("most", [0, 3])
def test_what_the_jobs_rules_refuse_is_counted_and_never_shown(
    cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    def refuse(site: Site) -> None:
        env = site.cluster.component_placement["env"]
        if env.node_group and any((part.resources or range(1)).stop > most for part in env.rank_map.parts):
            site.report("too-many", "too many environments", ("cluster", "component_placement", "env"))

    runs = both(job)
    monkeypatch.setattr("rlinf_cli.job.machine_rules.check", refuse)
    made, text = advice(cli, job, runs), cli("inspect", "placement", job, "--advise", runs).out
    assert {fault["code"] for fault in made["faults"]} == {"too-many"}
    assert f"{len(made['faults'])} refused by `rlinf validate`" in text
    assert "refused: too many environments [too-many]" in text
    assert all(int(judged["components"]["env"]["ranks"][-1]) < most for judged in made["best"])
    if most:
        assert load_job("advice.yaml").world_sizes["env"] in range(1, most + 1)
    else:
        assert "refuses the fastest placements" in text
        assert (made["best"], made["patch"]) == ([], None)


def test_recorded_runs_need_not_be_trainable_any_more(cli: Cli, job: Path) -> None:
    runs = both(job)
    for run in runs.split(","):
        file = Path(run) / "config.yaml"
        file.write_text(file.read_text().replace("  max_steps: 5", "  max_steps: 5\n  resume_dir: gone"))
        assert "resume_dir" in file.read_text()
    assert advice(cli, job, runs)["change_advised"]


def test_assumed_accelerators_are_those_of_the_runs_too(cli: Cli, job: Path) -> None:
    job.write_text(job.read_text().replace("accelerators: {model: A800, per_node: 4}", "hosts: there"))
    runs = both(job)
    assert advice(cli, job, runs, "--assume", "gpu=4xA800")["change_advised"]


def test_a_component_without_an_accelerator_has_no_ranks_of_one(cli: Cli, job: Path) -> None:
    text = job.read_text().replace("num_nodes: 1", "num_nodes: 2").replace("actor,rollout,env: 0", PLACED)
    job.write_text(
        text.replace("  node_groups:", "  node_groups:\n    - {label: sim, node_ranks: 1, accelerators: {per_node: 0}}")
    )
    run = str(record_run(job, "one", "", processes=1))
    made = advice(cli, job, run)
    assert made["now"]["components"]["env"] == {"group": None, "ranks": None}
    assert made["now"]["components"]["actor"] == {"group": "gpu", "ranks": "0"}


def test_fewer_accelerators_at_the_same_speed_are_in_the_record(cli: Cli, job: Path) -> None:
    flat = {phase: (component, 0.1, 0.0) for phase, (component, _, _) in LINES.items()}
    one, two = (record_run(job, f"{number}", f"0-{number}", processes=number + 1, lines=flat) for number in (0, 1))
    words = [f"cluster.component_placement.{part}=0-3" for part in ("actor", "rollout", "env")]
    made = advice(cli, job, f"{one},{two}", *words)
    assert (made["leaner"]["accelerators"], made["now"]["accelerators"]) == (1, 4)
    assert made["patch"] == "advice.yaml"
    assert advice(cli, job, f"{one},{two}")["leaner"] is None


def test_commands_that_are_printed_can_be_typed(cli: Cli, job: Path) -> None:
    run = str(record_run(job, "one", "0", processes=1))
    odd = job.rename("my job.yaml")
    text = cli("inspect", "placement", odd, "--advise", run).out
    words = shlex.split(next(line for line in text.splitlines() if "to decide" in line).split("`")[1])
    assert words[:3] == ["rlinf", "train", "my job.yaml"]
    assert load_job(words[2], words[3:]).ok


def test_a_run_without_a_record_is_named(cli: Cli, job: Path) -> None:
    run = record_run(job, "one", "0", processes=1)
    (run / "profile.json").unlink()
    ended = cli("inspect", "placement", job, "--advise", str(run))
    assert "has no record of its calls" in ended.err
    shutil.copy(job, run / "profile.json")
    assert "the record of calls cannot be read" in cli("inspect", "placement", job, "--advise", str(run)).err


def hold(monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    """Let another job hold devices of this machine."""
    about = {"run": "/runs/other", "step": 12, "total": 30}
    claims = [{"device": device, "pid": 7, "user": os.getuid(), "about": about} for device in devices]
    monkeypatch.setattr("rlinf_cli.advice.job_devices.listing", lambda: {"claims": claims, "waiting": []})


@pytest.mark.parametrize(("held", "free"), [((0,), (1, 2, 3)), ((1,), (2, 3)), ((0, 3), (1, 2)), ((), (0, 1, 2, 3))])
def test_advice_on_free_accelerators_leaves_held_ones(
    cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[int, ...], free: tuple[int, ...]
) -> None:
    hold(monkeypatch, "SO-101:/dev/arm", *(f"NVIDIA:{number}" for number in held))
    runs = both(job)
    made = advice(cli, job, runs, "--free")
    assert made["free"] == {"cluster": list(free)}
    assert made["blocked"] == (0 in held)
    assert made["change_advised"]
    places = [place for judged in made["best"] for place in judged["components"].values()]
    assert {int(rank) for place in places for rank in place["ranks"].split("-")} <= set(free)
    assert load_job("advice.yaml").ok
    if held == (0,):
        text = cli("inspect", "placement", job, "--advise", runs, "--free").out
        assert "free now, in a row: 1-3 of cluster" in text
        assert "held: NVIDIA 0 of node 0: /runs/other, step 12 of 30" in text
        assert "1 is the fastest on free ones" in text


def test_nothing_free_is_an_error_that_names_the_holder(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, *(f"NVIDIA:{number}" for number in range(4)))
    err = cli.fails(2, "inspect", "placement", job, "--advise", both(job), "--free")
    assert "no accelerator of the file is free" in err
    assert "NVIDIA 3 of node 0: /runs/other, step 12 of 30" in err


def test_groups_of_the_same_accelerators_are_one_kind(cli: Cli, job: Path) -> None:
    """As of shipped jobs, whose simulator has an interpreter of its own on the accelerators of the others."""
    sim = "{label: sim, node_ranks: 0, accelerators: {model: A800, per_node: 4}, env_configs: [{node_ranks: 0,"
    sim += " python_interpreter_path: /opt/sim/bin/python}]}"
    text = job.read_text().replace("actor,rollout,env: 0", PLACED)
    job.write_text(text.replace("  node_groups:", f"  node_groups:\n    - {sim}"))
    one, two = (record_run(job, f"{number}", "", processes=number) for number in (1, 2))
    made = advice(cli, job, f"{one},{two}")
    best = made["best"][0]
    assert best["components"]["env"] == {"group": "sim", "ranks": "0-3"}
    assert best["components"]["actor"] == {"group": "gpu", "ranks": "0-3"}
    # Who shares one waits for it.
    assert made["now"]["seconds"] / best["seconds"] > 1.5
    assert best["accelerators"] == 4
    changed = load_job("advice.yaml")
    changed.raise_if_bad()
    assert changed.world_sizes == {"actor": 4, "rollout": 4, "env": 4}
