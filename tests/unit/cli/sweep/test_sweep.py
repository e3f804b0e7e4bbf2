"""Sweeps: the grid of values, and the queue of runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlinf_cli.run.sweep import RunQueue
from rlinf_cli.run.sweep_plan import MOST_POINTS, axes_of, plan_of, points_of, several, short_keys, split_values
from rlinf_cli.runs.run_lookup import all_runs
from rlinf_core.errors import ConfigError
from tests.unit.cli.conftest import PACKAGES
from tests.unit.cli.typed import Cli
from tests.waiting import until

RLINF = Path(sys.executable).with_name("rlinf")
SWEEP = ("train", "recipe=fake", "--folder", "swept")


@pytest.fixture(autouse=True)
def folder(fake_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLINF_REPORT", "0")
    return fake_recipe


def statuses() -> dict[str, str]:
    return {run.state.experiment: run.state.status for run in all_runs(Path("swept"))}


def test_every_run_is_trained_once(cli: Cli) -> None:
    ended = cli(*SWEEP, "fake.seconds=0,0.001", "fake.end=0,0.5", "--parallel", "2")
    assert ended.code == 0
    assert statuses() == {
        "01-seconds-0-end-0": "finished",
        "02-seconds-0-end-0.5": "finished",
        "03-seconds-0.001-end-0": "finished",
        "04-seconds-0.001-end-0.5": "finished",
    }
    heads, *rows = ended.out.splitlines()
    assert heads.split() == ["run", "seconds", "end", "status", "step", "result", "time"]
    assert [row.split()[:5] for row in rows][2] == ["03", "0.001", "0", "finished", "12"]
    assert "4 of 4 finished" in ended.err
    assert "a worker prints" in (Path("swept") / "logs" / "01-seconds-0-end-0.log").read_text()

    again = cli(*SWEEP, "fake.seconds=0,0.001", "fake.end=0,0.5")
    assert again.code == 0
    assert "continued sweep" in again.err
    assert len(all_runs(Path("swept"))) == 4


def test_files_of_the_working_folder_are_not_imported(cli: Cli) -> None:
    for name in ("random.py", "typer.py", "rlinf_cli.py"):
        Path(name).write_text("import pathlib; pathlib.Path('planted').touch()\nraise SystemExit(7)\n")
    assert cli(*SWEEP, "fake.seconds=0,0.001").code == 0
    assert not Path("planted").exists()


def test_a_failed_run_ends_no_other(cli: Cli) -> None:
    ended = cli(*SWEEP, "fake.fail=bug,restart", "--json")
    assert ended.code == 1
    record = json.loads(ended.out)
    assert [run["status"] for run in record["runs"]] == ["failed", "finished"]
    assert record["runs"][0]["reason"]
    assert record["runs"][0]["values"] == {"fake.fail": "bug"}
    assert "continue with: rlinf train recipe=fake fake.fail=bug,restart --folder" in ended.err

    cli(*SWEEP, "fake.fail=bug,restart")
    assert [run.state.experiment for run in all_runs(Path("swept"))] == [
        "01-fail-bug",
        "01-fail-bug",
        "02-fail-restart",
    ]


def test_a_signal_ends_the_runs_and_the_sweep() -> None:
    argv = [RLINF, *SWEEP, "fake.seconds=600,601", "--parallel", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        until(lambda: list(statuses().values()) == ["running", "running"], "the start of both runs", 120)
        sweep.send_signal(signal.SIGINT)
        _, err = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert set(statuses().values()) == {"interrupted"}
    assert "Traceback" not in err
    assert "continue with: rlinf train recipe=fake fake.seconds=600,601" in err


def test_a_killed_sweep_waits_for_its_runs(cli: Cli) -> None:
    argv = [RLINF, *SWEEP, "fake.seconds=0.3,0.31"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        until(lambda: "running" in statuses().values(), "the start of a run", 120)
        sweep.kill()
    cli.out(*SWEEP, "fake.seconds=0.3,0.31")
    assert list(statuses().values()) == ["finished", "finished"]
    assert len(all_runs(Path("swept"))) == 2


def test_folders_of_others_are_left_alone_and_never_shared(cli: Cli) -> None:
    assert cli(*SWEEP, "fake.seconds=0,0.001").code == 0
    other = cli(*SWEEP, "fake.seconds=0,0.002")
    assert other.code != 0
    assert "the folder belongs to another sweep" in other.err
    shared = cli(*SWEEP, "fake.seconds=0,0.001", "fake.end=0.1")
    assert "the configuration of 01-seconds-0, 02-seconds-0.001 is another one now" in shared.err
    Path("full").mkdir()
    Path("full", "thesis.tex").write_text("x")
    full = cli("train", "recipe=fake", "fake.seconds=0,1", "--folder", "full")
    assert "the folder for the sweep is not empty" in full.err
    assert os.listdir("full") == ["thesis.tex"]
    with open("swept/sweep.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = cli(*SWEEP, "fake.seconds=0,0.001")
    assert ended.code != 0
    assert "another process works on this sweep" in ended.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "it is not JSON"),
        ('{"schema": "rlinf.sweep/1", "runs": [{"name": 3}]}', "`runs.0.name` is `3`"),
        ('{"schema": "rlinf.sweep/9", "runs": []}', "`schema`"),
    ],
)
def test_a_planted_file_is_refused(cli: Cli, content: str, words: str) -> None:
    Path("swept").mkdir()
    Path("swept", "sweep.json").write_text(content)
    ended = cli(*SWEEP, "fake.seconds=0,0.001")
    assert ended.code != 0
    assert words in ended.err
    assert statuses() == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipe=fake", "fake.seconds=1", "--folder", "swept"), "nothing to sweep"),
        (("recipe=fake", "fake.seconds=1,x"), "x"),
        (("recipe=fake", "fake.seconds=1,1.0"), "runs 01-seconds-1 and 02-seconds-1.0 have the same configuration"),
        (("recipe=fake", "--seeds", "0"), "--seeds"),
        (("recipe=fake", "fake.api_key=a1b2c3d4,e5f6a7b8"), "`fake.api_key` is a secret"),
        (("recipe=fake", "fake.api_key=a1b2c3d4,e5f6a7b8"), "write `${env:NAME}` in the file"),
        (("recipe=fake", "fake.seconds=0,1", "runner.resume_dir=auto"), "each of its runs has its own"),
        (("recipe=fake", "fake.seconds=0,1", "--seeds", "2"), "no training seed"),
        (("recipe=fake", "fake.seconds=0,1", "fake.seconds=2"), "`fake.seconds` is given twice"),
        (("-", "--seeds", "2"), "a sweep takes neither standard input"),
        (("recipe=fake", "--seeds", "0"), "'--seeds'"),
        (("fake.seconds=0,1",), "name a file or a recipe"),
    ],
)
def test_what_cannot_be_swept_is_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ended = cli("train", *arguments)
    assert ended.code != 0
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert os.listdir() == []


def test_seeds_of_evaluations_stay() -> None:
    values = "actor.optim.lr=1e-4,3e-4"
    plan = plan_of("embodied/pick-laptop", [values, "actor.seed=1e3"], [values], 2)
    assert [point.values["seed"] for point in plan.points] == ["0", "1", "0", "1"]
    first, second = (dict(word.split("=") for word in point.overrides) for point in plan.points[:2])
    assert int(second["actor.seed"]) == int(first["actor.seed"]) + 1
    assert int(second["env.train.seed"]) == int(first["env.train.seed"]) + 1
    assert second["env.eval.seed"] == first["env.eval.seed"]


@pytest.mark.parametrize(
    ("override", "swept"),
    [
        ("actor.optim.lr=1e-4,3e-4", True),
        ("actor.model.model_type=mlp_policy,cnn_policy", True),
        ("runner.logger.experiment_name=a,b", True),
        ('runner.logger.experiment_name="a,b"', False),
        ("actor.seed=1", False),
        ("actor.seed=[1,2]", False),
        # A placement is a list of ranks by itself.
        ("cluster.component_placement.actor=0,1", False),
        ("no.such.key=1,2", True),
    ],
)
def test_a_comma_makes_a_sweep_except_where_a_key_takes_it(override: str, swept: bool) -> None:
    assert several("embodied/pick-laptop", ["env.eval.seed=3", override]) == ([override] if swept else [])


def test_a_dry_run_writes_nothing(cli: Cli) -> None:
    listed = "run seconds 01-seconds-0 0 02-seconds-1 1"
    assert cli.out("train", "recipe=fake", "fake.seconds=0,1", "--dry-run").split() == listed.split()
    assert os.listdir() == []


class StandsStill:
    """A run in the place of a process: it makes no step, and ends at the second signal."""

    environments: ClassVar[list[dict[str, str]]] = []
    signals: ClassVar[list[int]] = []

    def __init__(self, argv: list[str], *, env: dict[str, str], **_: Any) -> None:
        self.environments.append(env)

    def poll(self) -> int | None:
        return 130 if len(self.signals) > 1 else None

    def wait(self) -> int:
        return 130

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_run_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_cli.run.sweep.subprocess.Popen", StandsStill)
    monkeypatch.setattr("rlinf_cli.run.sweep.GRACE_SECONDS", 0.0)
    monkeypatch.delenv("RLINF_CLAIMS", raising=False)
    plan = plan_of("recipe=fake", ["fake.end=0,1"], ["fake.end=0,1"], 0)
    plan = plan._replace(points=plan.points[:1])
    Path("swept").mkdir()
    queue = RunQueue(plan, Path("swept"), 1, lambda _: None, waits=False, patience=0.0)
    ended = queue.work()["01-end-0"]
    assert (ended.status, ended.reason) == (
        "failed",
        "exit status 130 before it had a run folder, see logs/01-end-0.log",
    )
    assert queue.stalled == {"01-end-0"}
    assert StandsStill.signals == [signal.SIGINT, signal.SIGINT]
    assert StandsStill.environments[0]["RLINF_CLAIMS"] == "no-wait"


@pytest.mark.parametrize("text", ["extends: ./fake.yaml\nfake: {seconds: 1}\n", "extends: [\n"])
def test_a_run_of_a_changed_file_is_not_started(cli: Cli, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """All runs are those that were validated, also of a long sweep whose file is edited meanwhile."""
    file = Path("job.yaml")
    shutil.copy(PACKAGES / "fake.yaml", "fake.yaml")
    file.write_text("extends: ./fake.yaml\n")
    popen, started = subprocess.Popen, list[list[str]]()

    def edits(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(argv)
        file.write_text(text)
        return popen([sys.executable, "-c", ""], **options)

    monkeypatch.setattr("rlinf_cli.run.sweep.subprocess.Popen", edits)
    ended = cli("train", "job.yaml", "fake.end=0,1", "--folder", "swept", "--json")
    assert (ended.code, len(started)) == (1, 1)
    assert "run 02 failed after step 0: the file has changed since the sweep began" in ended.err
    reasons = [run["reason"] for run in json.loads(ended.out)["runs"]]
    assert reasons[0].startswith("exit status 0 before it had a run folder")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", ["1e-4"]),
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{a: 1, b: [2,3]},null", ["{a: 1, b: [2,3]}", "null"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'a,b'", ["'a,b'"]),
        ("it's,fine", ["it's", "fine"]),
        ('["]",1],2', ['["]",1]', "2"]),
        ("", [""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_divide(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=1,,2"], "a value of the sweep is empty"),
        (["lr=1,"], "a value of the sweep is empty"),
        (["lr=1,2,1"], "the value `1` is given twice"),
        (["lr=1,2", "lr=3,4"], "`lr` is swept twice"),
    ],
)
def test_slips_of_the_command_line_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        axes_of(overrides)
    assert message in str(error.value)


def test_every_combination_runs_with_every_seed() -> None:
    points = points_of(
        {"actor.optim.lr": ["1e-4", "3e-4"], "data.lr": ["a", "b"]},
        [{"actor.seed": 7, "data.seed": 0}, {"actor.seed": 8, "data.seed": 1}],
    )
    assert [point.name for point in points][:3] == [
        "01-optim.lr-1e-4-data.lr-a-seed-0",
        "02-optim.lr-1e-4-data.lr-a-seed-1",
        "03-optim.lr-1e-4-data.lr-b-seed-0",
    ]
    assert len({point.name for point in points}) == len(points) == 8
    assert points[1].overrides == ("actor.optim.lr=1e-4", "data.lr=a", "actor.seed=8", "data.seed=1")
    assert points[1].values == {"actor.optim.lr": "1e-4", "data.lr": "a", "seed": "1"}


def test_too_many_runs_are_refused() -> None:
    axes = axes_of([f"{key}={','.join(map(str, range(32)))}" for key in ("lr", "gamma")])
    with pytest.raises(ConfigError, match=f"the sweep has 1024 runs, at most are {MOST_POINTS}"):
        points_of(axes, [])


def test_names_are_short_and_safe_for_folders() -> None:
    (point,) = points_of({"env.task": ["../x y/;rm"]}, [])
    assert point.name == "01-task-..-x-y-rm"
    names = ["actor.warm_start.lr", "teacher.warm_start.lr", "algorithm.gamma", "seed"]
    assert list(short_keys(names).values()) == ["actor.warm_start.lr", "teacher.warm_start.lr", "gamma", "seed"]
