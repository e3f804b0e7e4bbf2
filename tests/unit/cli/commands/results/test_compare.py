"""`rlinf compare`: the first difference that matters, and whether results differ by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlinf_cli.report.curves import mean_and_range
from rlinf_cli.runs.documents import Provenance, write_provenance
from rlinf_cli.runs.metric_columns import MetricColumn
from rlinf_cli.runs.metric_comparison import differences
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.job.load import load_job
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.typed import Cli

CONFIG: dict[str, Any] = {
    "recipe": "embodied",
    "cluster": {"num_nodes": 1, "component_placement": {"actor": {"node_group": "node", "placement": 0}}},
    "actor": {
        "seed": 1,
        "global_batch_size": 800,
        "model": {"hidden_dim": 64, "precision": "fp32"},
        "optim": {"lr": 0.001},
    },
    "env": {
        "train": {"env_type": "franka_kin", "task": "pick", "seed": 1, "total_num_envs": 64},
        "eval": {"total_num_envs": 64, "task": "pick"},
    },
    "algorithm": {"gamma": 0.99, "clip_ratio_low": 0.2, "options": {"normalize_advantages": True, "value_clip": None}},
    "runner": {"max_steps": 10, "val_check_interval": 5, "logger": {"log_path": "runs", "experiment_name": "a"}},
    "data": {"train_data_paths": ["sums.jsonl"]},
}
PROVENANCE = Provenance(
    {"python": "3.11.7", "torch": "2.13.0", "gymnasium": "1.4.0"},
    {"rlinf_core": "aa", "recipes": "bb", "commit": "c" * 40, "uncommitted": ""},
    {"sums.jsonl": "11"},
    {"host": "one", "processors": "2"},
)
# What is changed in the second run of a pair, and where: a key of the file, or a part of the provenance.
PAIRS: list[tuple[str, Any]] = [
    ("recipe", "math"),
    ("actor.optim.lr", 0.003),
    ("actor.global_batch_size", 400),
    ("actor.model.hidden_dim", 128),
    ("actor.model.precision", "bf16"),
    ("algorithm.gamma", 0.98),
    ("algorithm.clip_ratio_low", 0.1),
    ("algorithm.options.normalize_advantages", False),
    ("algorithm.options.value_clip", 0.2),
    ("env.train.task", "reach"),
    ("env.train.total_num_envs", 32),
    ("env.eval.total_num_envs", 128),
    ("runner.val_check_interval", 1),
    ("cluster.component_placement.actor.placement", 1),
    ("data.train_data_paths", ["products.jsonl"]),
    ("inputs:sums.jsonl", "22"),
    ("code:recipes", "cc"),
    ("code:uncommitted", "dd"),
    ("versions:torch", "2.12.0"),
    ("versions:python", "3.12.1"),
    ("machine:host", "two"),
]


def made(
    name: str, config: Mapping[str, Any], provenance: Provenance | None, success: float, folder: str = "runs"
) -> RunFolder:
    """A finished run whose last evaluation had some success in 64 episodes."""
    run = RunFolder.create(
        RunnerConfig.model_validate({"logger": {"experiment_name": name, "log_path": folder}}), "embodied"
    )
    writer: Any = YAML(typ="safe", pure=True)
    with run.config_file.open("w") as file:
        writer.dump(dict(config), file)
    if provenance is not None:
        write_provenance(run.path, provenance)
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(1, 11):
            metrics.log(step, {"env/return": float(step), "rollout/reward": 1.0})
        metrics.log(10, {"eval/success_at_end": success, "eval/episodes": 64.0})
    run.update(step=10)
    run.end(RunStatus.FINISHED)
    return run


def changed(name: str, value: Any) -> tuple[dict[str, Any], Provenance]:
    part, _, key = name.rpartition(":")
    if part:
        return CONFIG, PROVENANCE._replace(**{part: {**getattr(PROVENANCE, part), key: value}})
    config = deepcopy(CONFIG)
    *path, last = name.split(".")
    section = config
    for item in path:
        section = section[item]
    section[last] = value
    # Every run has a name of its own, which is no difference.
    config["runner"]["logger"]["experiment_name"] = "b"
    return config, PROVENANCE


# The same with whole configurations as runs keep them, in which a change brings others about.
CHANGES: dict[str, tuple[str, ...]] = {
    "embodied/pick-laptop": (
        *("actor.optim.lr=0.003", "actor.seed=7", "actor.model.hidden_dim=64", "algorithm.gamma=0.9"),
        *("algorithm.update_epoch=2", "algorithm.clip_ratio_high=0.3", "runner.max_steps=20", "runner.max_staleness=1"),
        *("env.train.task=reach", "env.train.env_type=franka_mujoco", "env.train.total_num_envs=128"),
        *("env.train.reward_coef=2.0", "env.train.max_episode_steps=40", "env.train.seed=9"),
        *("env.eval.total_num_envs=32", "runner.val_check_interval=7", "cluster.num_nodes=2"),
    ),
    "math/sums-laptop": (
        *("algorithm.adv_type=rloo", "algorithm.group_size=4", "rollout.sampling_params.temperature=0.9"),
        *("data.options.digits=2", "actor.model.num_layers=3", "data.seed=3", "data.val_size=50"),
        *("actor.model.precision=bf16", "reward.correct_reward=2.0"),
    ),
}


def kept(name: str, *overrides: str) -> Any:
    """Return the configuration that a run of a shipped file keeps, as plain data."""
    job = load_job(name, overrides, environ={})
    assert job.tree is not None
    return YAML(typ="safe", pure=True).load(resolved_text(job.tree, job.config))


@pytest.mark.parametrize(("name", "change"), [(name, item) for name, several in CHANGES.items() for item in several])
def test_changed_key_comes_first_among_whole_configurations(name: str, change: str) -> None:
    first, *others = differences([kept(name), kept(name, change)], [None, None])
    assert first.name == change.partition("=")[0]
    # What follows from it is told, too.
    assert {other.name.replace(".eval.", ".train.") for other in others} <= {first.name}


def test_separate_evaluation_precedes_a_training_change() -> None:
    both = kept(
        "embodied/pick-laptop", "env.train.max_episode_steps=30", "env.eval.total_num_envs=32", "actor.optim.lr=0.1"
    )
    names = [difference.name for difference in differences([kept("embodied/pick-laptop"), both], [None, None])]
    assert names[-1] == "actor.optim.lr"
    assert names.index("env.train.max_episode_steps") < names.index("env.eval.max_episode_steps")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "value"), PAIRS)
def test_the_one_thing_that_differs_is_named_first(cli: Cli, name: str, value: Any) -> None:
    ours = made("a", CONFIG, PROVENANCE, 0.9)
    theirs = made("b", *changed(name, value), 0.25)

    out = cli.out("compare", ours.path, theirs.path)
    (first,) = (line for line in out.splitlines() if line.startswith("first difference"))
    assert first.startswith(f"first difference: {name.rpartition(':')[2]} (")
    assert "-0.65 [" in out
    assert "larger than noise" in out


def test_runs_that_differ_in_seeds_are_a_set(cli: Cli, contract: Callable[[str, str], Any]) -> None:
    runs: list[Path] = []
    for lr, successes in ((0.001, (0.5, 0.53125, 0.46875)), (0.003, (0.90625, 0.875, 0.9375))):
        for seed, success in enumerate(successes):
            config = deepcopy(CONFIG)
            config["actor"]["optim"]["lr"], config["actor"]["seed"] = lr, seed
            runs.append(made(f"lr{lr}-{seed}", config, PROVENANCE, success).path)

    data = contract("compare", cli("compare", *runs, "--json").out)

    assert [[len(item["runs"]), item["label"]] for item in data["sets"]] == [[3, "A"], [3, "B"]]
    (result,) = data["verdicts"]
    assert result["gap"] == pytest.approx(0.40625)
    assert (result["larger_than_noise"], result["basis"]) == (True, "3 and 3 seeds")
    assert data["differences"][0] == {"kind": "config", "name": "actor.optim.lr", "values": ["0.001", "0.003"]}


def test_what_a_resumption_changed_is_a_difference(cli: Cli) -> None:
    ours, theirs = made("a", CONFIG, PROVENANCE, 0.9), made("b", CONFIG, PROVENANCE, 0.25)
    before = theirs.config_file.read_text().replace("lr: 0.001", "lr: 0.1").replace("max_steps: 10", "max_steps: 5")
    (theirs.path / "config.1.yaml").write_text(f"{before}gone: 1\n")
    out = cli.out("compare", ours.path, theirs.path)
    assert "first difference: actor.optim.lr (config), 0.001 | 0.1, then 0.001" in out
    assert "max_steps" not in out
    assert "gone" not in out


def test_another_metric_and_a_picture(cli: Cli) -> None:
    ours, theirs = made("a", CONFIG, None, 0.9), made("b", CONFIG, PROVENANCE, 0.9)
    out = cli.out("compare", ours.path.name, theirs.path.name, "--metric", "env/return", "--plot", "both.svg")
    assert "env/return" in out.splitlines()[0]
    assert "no recorded difference between the runs" in out
    assert "<svg" in Path("both.svg").read_text()
    # Two seeds of the same are within noise.
    config = deepcopy(CONFIG)
    config["actor"]["seed"] = config["env"]["train"]["seed"] = 2
    out = cli.out("compare", ours.path, made("c", config, PROVENANCE, 0.9375).path)
    assert "first difference: actor.seed (seeds), 1 | 2" in out
    assert "within noise" in out


def test_the_runs_of_a_folder_are_compared(cli: Cli) -> None:
    for name, lr, seed in (("1-a", 0.001, 1), ("2-b", 0.001, 2), ("3-c", 0.003, 1), ("4-d", 0.003, 2)):
        config = deepcopy(CONFIG)
        config["actor"] |= {"seed": seed, "optim": {"lr": lr}}
        made(name, config, PROVENANCE, lr * 100 + seed / 10, folder="runs/swept")
    (made("1-a", CONFIG, PROVENANCE, 0.5, folder="runs/swept").path / "run.json").unlink()

    out = cli.out("compare", "swept", "--plot", "mean.svg", "--metric", "eval/success_at_end", "--metric", "env/return")
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["A", "A", "B", "B"]
    picture = Path("mean.svg").read_text()
    assert picture.count("role-title-text") == 2
    # A folder that is no sweep has all of its runs compared, and one that cannot be read is named.
    again = made("1-a", CONFIG, PROVENANCE, 0.9, folder="runs/swept").path
    assert len(cli.out("compare", "swept").partition("\n\n")[0].splitlines()) == 1 + 5
    (made("1-a", CONFIG, PROVENANCE, 0.9, folder="runs/swept").path / "run.json").write_text("{")
    assert "is skipped: `run.json`" in cli("compare", "swept").err
    (again.parent / "sweep.json").touch()
    assert len(cli.out("compare", "swept").partition("\n\n")[0].splitlines()) == 1 + 4
    Path("runs/empty").mkdir()
    assert "there is no run in the folder" in cli("compare", "empty").err


def test_the_mean_is_of_steps_that_all_runs_have() -> None:
    columns = [MetricColumn([1, 2, 4], [0.0, 1.0, 3.0]), MetricColumn([2, 3, 4], [2.0, 9.0, 5.0])]
    places = [{step: 10.0 * step for step in range(1, 5)}, {step: 30.0 * step for step in range(1, 5)}]
    assert mean_and_range(columns, places) == [(40, 1.5, 1.0, 2.0), (80, 4.0, 3.0, 5.0)]
    assert mean_and_range([MetricColumn([1], [0.0]), MetricColumn([2], [0.0])], places) == []


def test_algorithm_precedes_the_protocol_of_evaluations() -> None:
    theirs = deepcopy(CONFIG)
    theirs["runner"]["val_check_interval"] = 1
    theirs["algorithm"] |= {"gamma": 0.9, "loss_type": "sac"}
    theirs["actor"]["optim"] = {"lr": 0.1}
    names = [difference.name for difference in differences([CONFIG, theirs], [None, None])]
    assert names == ["algorithm.loss_type", "algorithm.gamma", "runner.val_check_interval", "actor.optim.lr"]


def test_runs_are_laid_over_what_they_counted(cli: Cli) -> None:
    ours, theirs = (made(name, CONFIG, PROVENANCE, 0.9) for name in ("a", "b"))
    for run, counted in ((ours, 512.0), (theirs, 128.0)):
        run.metrics_file.unlink()
        with MetricsWriter(run.metrics_file) as metrics:
            for step in range(1, 4):
                metrics.log(step, {"env/return": float(step), "env/steps": counted})

    ended = cli("compare", ours.path, theirs.path, "--x", "env_steps", "-o", "both.svg")

    assert [line.split()[2:4] for line in ended.out.splitlines()[1:3]] == [["finished", "1536"], ["finished", "384"]]
    assert "environment steps" in ended.out.splitlines()[0]
    assert "environment steps" in Path("both.svg").read_text()
    ended = cli("compare", ours.path, theirs.path, "--x", "tokens")
    assert (ended.code, "a run does not count tokens" in ended.err) == (1, True)


def test_what_was_never_finite_and_who_vanished_is_said(cli: Cli) -> None:
    ours, theirs = made("a", CONFIG, PROVENANCE, float("nan")), made("b", CONFIG, PROVENANCE, 0.9)
    err = cli.fails(1, "compare", ours.path, theirs.path)
    assert "the run has no finite value of the metric `eval/success_at_end`" in err
    theirs.update(status="running", start=f"{theirs.state.pid}:1")
    ended = cli("compare", ours.path, theirs.path, "--metric", "env/return")
    assert [line.split()[2] for line in ended.out.splitlines()[1:3]] == ["finished", "failed"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("a",), 2, "two or more different runs"),
        (("a", "a"), 2, "two or more different runs"),
        (("a", "runs/../runs/*"), 2, "two or more different runs"),
        (("a", "c"), 1, "there is no run `c`"),
        (("a", "b", "--metric", "env/return", "--metric", "no/such"), 2, "further metrics are only drawn"),
        (("a", "b", "--metric", "env/retrun"), 1, "the run has no metric `env/retrun`"),
        (("a", "b", "--plot", "both.xyz"), 1, "the curves cannot be written"),
        (("a", "b", "--plot", "b.svg", "--metric", "env/return", "--metric", "no/such"), 1, "no run has the metric"),
    ],
)
def test_what_cannot_be_compared(cli: Cli, arguments: tuple[str, ...], code: int, message: str) -> None:
    names = {name: made(name, CONFIG, PROVENANCE, 0.9).path.name for name in ("a", "b")}
    names["runs/../runs/*"] = f"runs/../runs/{names['a']}"
    assert message in cli.fails(code, "compare", *(names.get(argument, argument) for argument in arguments))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "", "a run has no metrics to compare"),
        *(
            ("config.yaml", text, "the configuration of a run cannot be read")
            for text in ("a: [", "a: " + "[" * 100_000, "[" * 100_000 + "]" * 100_000, "- a", "", "a: !x 1\na: \0")
        ),
    ],
    ids=range(7),
)
def test_a_file_that_cannot_be_read_is_named(cli: Cli, file: str, text: str, message: str) -> None:
    ours, theirs = made("a", CONFIG, PROVENANCE, 0.9), made("b", CONFIG, PROVENANCE, 0.9)
    (theirs.path / file).write_text(text)
    err = cli.fails(1, "compare", ours.path.name, theirs.path.name)
    assert message in err
    assert str(theirs.path) in err
