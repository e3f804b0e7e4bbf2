"""`rlinf runs`, the memory of a run, and `rlinf why --replay`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.runs.documents import RecordedPlace, recorded_places
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage.run_events import quarantine
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, mark
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.typed import Cli, text_file
from tests.unit.cli.why.made_runs import made_run

DAY = 86400.0


def made(
    experiment: str, recipe: str, status: str, age: float, metrics: dict[int, dict[str, float]], weight: int = 0
) -> RunFolder:
    """A run of some age, in seconds, with checkpoints of `weight` bytes."""
    run = RunFolder.create(RunnerConfig.model_validate({"logger": {"experiment_name": experiment}}), recipe)
    with MetricsWriter(run.metrics_file) as writer:
        for step, record in metrics.items():
            writer.log(step, record)
    (run.path / "checkpoints").mkdir(exist_ok=True)
    (run.path / "checkpoints" / "weights").write_bytes(bytes(weight))
    run.update(created=time.time() - age, step=max(metrics, default=0))
    if status != RunStatus.RUNNING:
        run.end(status, "the camera is unplugged" if status == RunStatus.FAILED else "")
    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunFolder]:
    """Four runs of two recipes, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    metrics = {1: {"env/return": 1.0, "eval/success_at_end": 0.25}, 2: {"env/return": 475.0}}
    return {
        "good": made("good", "embodied", RunStatus.FINISHED, 2 * DAY, metrics, 3_000_000),
        "bad": made("bad", "embodied", RunStatus.FAILED, 9 * DAY, {}),
        "sums": made("sums", "math", RunStatus.FINISHED, 3 * 3600, {7: {"rollout/reward": 0.875}}, 500),
        "live": made("live", "math", RunStatus.RUNNING, 50, {3: {"rollout/reward": float("nan")}}),
    }


def names(out: str) -> list[str]:
    return [line.split("-")[0] for line in out.splitlines()[1:]]


def test_the_table_tells_status_step_result_age_and_size(cli: Cli, runs: dict[str, RunFolder]) -> None:
    ended = cli("runs")

    assert ended.code == 0
    head, *rows = (line.split() for line in ended.out.splitlines())
    assert head == ["run", "recipe", "status", "step", "result", "age", "size"]
    assert [row[0] for row in rows] == [runs[name].path.name for name in ("live", "sums", "good", "bad")]
    assert rows[0][1:4] == ["math", "running", "3"]
    assert rows[1][1:8] == ["math", "finished", "7", "reward", "0.875", "3", "h"]
    # That of the evaluation, though a later step has a return.
    assert rows[2][1:] == ["embodied", "finished", "2", "success", "0.25", "2", "d", "3", "MB"]
    assert rows[3][1:6] == ["embodied", "failed", "0", "9", "d"]
    assert f"`rlinf why runs/{runs['bad'].path.name}`" in ended.err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--status", "finished"), ["sums", "good"]),
        (("--status", "failed", "--status", "running"), ["live", "bad"]),
        (("--recipe", "embodied"), ["good", "bad"]),
        (("--sort", "name"), ["bad", "good", "live", "sums"]),
        (("--sort", "step"), ["sums", "live", "good", "bad"]),
        (("--sort", "size", "--recipe", "embodied"), ["good", "bad"]),
        (("--sort", "age", "--reverse"), ["bad", "good", "sums", "live"]),
        (("--sort", "result", "--status", "finished"), ["sums", "good"]),
    ],
)
def test_filters_and_order(cli: Cli, runs: dict[str, RunFolder], arguments: tuple[str, ...], shown: list[str]) -> None:
    ended = cli("runs", *arguments)

    assert (ended.code, names(ended.out)) == (0, shown)


def test_data_is_of_its_contract(
    cli: Cli, runs: dict[str, RunFolder], contract: Callable[[str, str], Any], tmp_path: Path
) -> None:
    by_name = {item["experiment"]: item for item in contract("runs", cli("runs", "--json").out)["runs"]}
    assert by_name["good"]["result"] == {"name": "success", "value": 0.25}
    assert by_name["good"]["evaluation"] == {"step": 1, "metrics": {"eval/success_at_end": 0.25}}
    assert (by_name["bad"]["result"], by_name["bad"]["reason"]) == (None, "the camera is unplugged")
    assert by_name["live"]["result"] == {"name": "reward", "value": None}
    assert "no runs in" in cli.refuses(0, "runs", "--runs-dir", tmp_path / "nowhere")


def test_the_result_is_not_rounded_in_data(cli: Cli, runs: dict[str, RunFolder]) -> None:
    made("exact", "math", RunStatus.FINISHED, 10, {1: {"eval/reward": 0.123456789, "eval/left_out": 2.0}})
    record = json.loads(cli("runs", "--json").out)["runs"][0]
    assert record["result"] == {"name": "reward", "value": 0.123456789}
    assert "reward 0.123 of 0, 2 left out" in cli("runs").out


def test_link_beside_its_run_lists_it_once(cli: Cli, runs: dict[str, RunFolder]) -> None:
    (Path("runs") / "latest").symlink_to(runs["live"].path.name)
    assert len(json.loads(cli("runs", "--json").out)["runs"]) == 4
    assert json.loads(cli("report", "--text", "latest", "--json").out)["experiment"] == "live"


def test_commands_in_messages_can_be_pasted(cli: Cli, runs: dict[str, RunFolder]) -> None:
    Path("runs").rename("my runs")
    ended = cli("runs", "--runs-dir", "my runs")
    assert f"`rlinf why 'my runs/{runs['bad'].path.name}'`" in ended.err


def test_folder_of_runs_that_cannot_be_read_is_no_empty_one(cli: Cli, runs: dict[str, RunFolder]) -> None:
    file = text_file(Path("notes.txt"), "")
    assert "the folder of runs cannot be read" in cli.refuses(1, "runs", "--runs-dir", file)
    assert "no runs in" in cli.refuses(0, "runs", "--runs-dir=/proc/1")
    for words in (("--runs-dir", "", "runs"), ("runs", "--runs-dir=")):
        assert "`--runs-dir` needs a folder" in cli.refuses(2, *words)


def test_the_home_folder_is_meant_by_its_sign(
    cli: Cli, runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.getcwd())
    assert names(cli("runs", "--runs-dir=~/runs").out) == names(cli("runs").out)
    monkeypatch.setenv("RLINF_RUNS", "~/runs")
    assert names(cli("runs").out) == ["live", "sums", "good", "bad"]


class TestPrune:
    def test_is_a_dry_run_at_first(
        self, cli: Cli, runs: dict[str, RunFolder], contract: Callable[[str, str], Any]
    ) -> None:
        ended = cli("runs", "prune", "--older-than", "1d")

        assert (ended.code, names(ended.out)) == (0, ["good", "bad"])
        assert "would delete 2 runs, 3 MB; add --delete" in ended.err
        assert all(run.path.is_dir() for run in runs.values())
        data = contract("runs-prune", cli("runs", "prune", "--older-than", "1d", "--json").out)
        assert (data["dry_run"], [run["experiment"] for run in data["runs"]]) == (True, ["good", "bad"])

    def test_deletes_what_is_chosen_and_nothing_else(self, cli: Cli, runs: dict[str, RunFolder]) -> None:
        assert names(cli("runs", "prune", "--keep", "1").out) == ["good", "bad"]
        ended = cli("runs", "prune", "--status", "failed", "--older-than", "7d", "--delete")
        assert (ended.code, names(ended.out)) == (0, ["bad"])
        assert "deleted 1 run" in ended.err
        assert [name for name, run in runs.items() if run.path.exists()] == ["good", "sums", "live"]
        assert (Path("runs") / "notes").is_dir()

    def test_a_path_with_dots_is_the_same_run(self, cli: Cli, runs: dict[str, RunFolder]) -> None:
        name = runs["good"].path.name
        direct, around = (json.loads(cli("runs", "prune", run, "--json").out) for run in (name, f"runs/../runs/{name}"))
        assert around["runs"][0]["checkpoints_elsewhere"] is None
        assert around["bytes"] == direct["bytes"]

    def test_what_stays_is_not_called_deleted(
        self, cli: Cli, runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rmtree = shutil.rmtree

        def fail(path: Path) -> None:
            if runs["bad"].path in path.parents:
                raise OSError(13, "Permission denied", str(path))
            rmtree(path)

        monkeypatch.setattr(shutil, "rmtree", fail)
        names = [runs[name].path for name in ("bad", "sums", "sums")]
        ended = cli("runs", "prune", *names, "--delete", "--json")
        assert ended.code == 1
        assert "cannot be deleted completely" in ended.err
        assert "deleted 1 run," in ended.err
        assert [run["experiment"] for run in json.loads(ended.out)["runs"]] == ["sums"]

    @pytest.mark.parametrize(
        ("typed", "code", "message"),
        [
            ("", 2, "name the runs"),
            ("--older-than soon", 2, "36h"),
            ("--status lost", 2, "lost"),
            ("goof --delete", 1, "there is no run `goof`"),
        ],
    )
    def test_usage(self, cli: Cli, runs: dict[str, RunFolder], typed: str, code: int, message: str) -> None:
        assert message in cli.fails(code, "runs", "prune", *typed.split())
        assert all(run.path.is_dir() for run in runs.values())

    def test_a_run_that_goes_on_stays(self, cli: Cli, runs: dict[str, RunFolder]) -> None:
        ended = cli("runs", "prune", runs["live"].path.name, runs["sums"].path, "--delete")

        assert ended.code == 0
        assert f"{runs['live'].path.name} is active and kept" in ended.err
        assert [name for name, run in runs.items() if run.path.exists()] == ["good", "bad", "live"]

    def test_a_run_that_another_one_needs_stays(self, cli: Cli, runs: dict[str, RunFolder]) -> None:
        base, middle, active = runs["bad"], runs["good"], runs["live"]
        model = base.path / "model"
        middle.config_file.write_text(f"actor: {{model: {{model_path: {model}}}}}\nrunner: {{resume_dir: {model}}}\n")
        resumed = middle.path / "checkpoints" / "global_step_1"
        active.update(resumed_from=str(resumed))
        (Path("runs") / "swept").mkdir()
        (Path("runs") / "swept" / "sweep.json").touch()
        active.path.rename(Path("runs") / "swept" / active.path.name)
        active = RunFolder.open(Path("runs") / "swept" / active.path.name)
        ended = cli("runs", "prune", "--older-than", "1d", "--delete")
        assert ended.code == 0
        assert f"{middle.path.name} is kept: {active.path.name} needs it, by `runner.resume_dir`" in ended.err
        assert f"{base.path.name} is kept: {middle.path.name} needs it, by `actor.model.model_path`" in ended.err
        assert base.path.exists()
        assert middle.path.exists()

        active.update(resumed_from=None)
        cli.out("runs", "prune", base.path, middle.path, "--delete")
        assert not base.path.exists()
        assert not middle.path.exists()

    def test_external_checkpoints_follow_their_run_without_links(
        self, cli: Cli, runs: dict[str, RunFolder], tmp_path: Path
    ) -> None:
        run, precious = runs["sums"], tmp_path / "precious"
        precious.mkdir()
        (precious / "data").write_text("x")
        (run.path / "link").symlink_to(precious)
        elsewhere = tmp_path / "weights" / run.path.name
        elsewhere.mkdir(parents=True)
        run.update(checkpoints=str(elsewhere))
        mark(elsewhere, run.path, run.state.run_id)
        # Nobody knows whose a folder without a mark is.
        runs["good"].update(checkpoints=str(precious))

        assert cli("runs", "prune", "--status", "finished", "--delete").code == 0
        assert not run.path.exists()
        assert not elsewhere.exists()
        assert (precious / "data").exists()

    def test_a_deletion_that_was_cut_short_can_be_taken_up(self, cli: Cli, runs: dict[str, RunFolder]) -> None:
        folder = runs["good"].path
        (folder / "metrics.jsonl").unlink()
        assert json.loads((folder / STATE).read_text())["status"] == RunStatus.FINISHED

        assert cli("runs", "prune", folder, "--delete").code == 0
        assert not folder.exists()


# Of accelerators that the file does not declare.
ON_UNKNOWN_GPUS = """
extends: math/sums-laptop
cluster:
  num_nodes: 2
  component_placement:
    actor,rollout,reward: {node_group: cluster, placement: 0-3}
"""


def placed(kind: str, places: list[tuple[int, int | None]]) -> dict[str, Any]:
    return {
        "processes": [
            {
                "rank": rank,
                "node_rank": node,
                "node_group": "cluster",
                "hardware_type": kind,
                "local_hardware_ranks": [] if unit is None else [unit],
            }
            for rank, (node, unit) in enumerate(places)
        ]
    }


COMPONENTS = {
    "actor": placed("NVIDIA", [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "rollout": placed("NVIDIA", [(0, 2), (1, 2)]),
    "reward": placed("node", [(0, None)]),
}


def test_places_are_read_from_the_run(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    assert recorded_places(file) == {}
    file.write_text(json.dumps({"components": COMPONENTS}))
    assert recorded_places(file)["rollout"] == [RecordedPlace(0, (2,)), RecordedPlace(1, (2,))]
    assert recorded_places(file)["reward"] == [RecordedPlace(0)]
    file.write_text('{"components": {"actor": {"processes": [{"rank": "0"}]}}}')
    with pytest.raises(RunError, match="has an invalid value"):
        recorded_places(file)


def test_a_run_needs_no_assumption(cli: Cli, tmp_path: Path) -> None:
    file = text_file(tmp_path / "job.yaml", ON_UNKNOWN_GPUS)
    assert "--assume 8" in cli.fails(2, "inspect", "memory", file)
    run = RunFolder.create(RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path)}}), "math")
    run.write_config_text(ON_UNKNOWN_GPUS)
    (run.path / "placement.json").write_text(json.dumps({"components": COMPONENTS}))
    ended = cli("inspect", "memory", run.path, "--available", "64", "--json")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out)
    assert {name: part["processes"] for name, part in record["components"].items()} == {
        "actor": 4,
        "rollout": 2,
        "reward": 1,
    }
    assert [node["node_rank"] for node in record["nodes"]] == [0, 1]
    assert record["components"]["actor"]["accelerator"] > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = made_run(tmp_path).path
    quarantine(path, "episode", "1834-17", 5, ["died"], {"seed": 1})
    quarantine(path, "prompt", "8", 5, ["died"])
    return path


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("episode-1834-18", ["there is no item `episode-1834-18`", "did you mean `episode-1834-17`?"]),
        ("quarantine/prompt-8.json", ["a prompt cannot be replayed alone", "look up prompt 8 in the data"]),
    ],
)
def test_item_that_cannot_be_replayed_is_refused(cli: Cli, folder: Path, item: str, words: list[str]) -> None:
    err = cli.fails(1, "replay", item, str(folder))
    assert all(said in err for said in words)
    shutil.rmtree(folder / "quarantine")
    assert "the run has no quarantined items" in cli.fails(1, "replay", item, str(folder))
