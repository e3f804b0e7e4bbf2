"""`rlinf import`: files of RLinf and verl, what is written, what is said, and how it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.typed import Cli, text_file

DATA = Path(__file__).parents[4] / "data" / "import"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file of RLinf without a defaults list."""
    return Path(shutil.copy(DATA / "embodied" / "frankasim_async.yaml", tmp_path))


def test_a_file_is_written_beside_with_a_summary(cli: Cli, job: Path) -> None:
    ended = cli("import", str(job))
    assert ended.code == 0, ended.err
    assert "rlinf validate" not in ended.err
    written = job.with_name("frankasim_async.rlinf.yaml")
    assert "22 carried, 2 renamed, 2 not needed, 2 not available" in ended.out
    for line in (
        "  algorithm.auto_reset  -> env.train.auto_reset",
        "  actor.optim.betas     -> actor.optim.adam_beta1, actor.optim.adam_beta2",
        "  actor.optim.optimizer  the optimizer is AdamW",
        "`frankasim` is our own Franka arm in MuJoCo",
    ):
        assert line in ended.out
    assert ended.out.splitlines()[-1] == f"{written}: valid"
    assert "    # Not carried over: the optimizer is AdamW" in written.read_text()
    assert cli("validate", str(written)).code == 0


def test_nothing_is_overwritten_unasked(cli: Cli, job: Path) -> None:
    written = text_file(job.with_name("frankasim_async.rlinf.yaml"), "mine")
    assert "already exists" in cli.fails(2, "import", str(job))
    assert written.read_text() == "mine"
    assert cli("import", str(job), "--replace").code == 0
    assert written.read_text() != "mine"
    before = job.read_text()
    assert cli("import", str(job), "-o", str(job), "--replace").code == 2
    assert job.read_text() == before


def test_standard_output_holds_the_file_alone(cli: Cli, job: Path) -> None:
    ended = cli("import", str(job), "-o", "-")
    assert ended.code == 0
    assert ended.out.startswith("# From `frankasim_async.yaml` of RLinf")
    assert "2 not available" in ended.err
    assert [path.name for path in job.parent.iterdir()] == [job.name]


def test_overrides_choose_groups_and_values(cli: Cli) -> None:
    file = str(DATA / "embodied" / "maniskill_ppo_mlp.yaml")
    ended = cli("import", file, "runner.max_epochs=7", "+runner.trace=true", "~runner.save_interval", "-o", "-")
    assert "max_epochs: 7" in ended.out
    assert "trace: true" in ended.out
    assert "save_interval" not in ended.out
    # A group of the file that this one starts from.
    file = str(DATA / "reasoning" / "reinpp_vllm.yaml")
    said = cli("import", file, "engines@rollout=sglang", "-o", "-").out
    assert "gpu_memory_utilization: 0.55" in said
    assert "backend: vllm" in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("runner.max_epohcs=3", "error[override-path]: Could not override 'runner.max_epohcs'"),
        ("~runner.max_epohcs", "error[override-path]: Could not delete"),
        ("+runner.max_epochs=3", "error[override-path]: Could not append"),
        ("+runner.trace=[1", "`+runner.trace=[1` is not an override in Hydra's syntax"),
    ],
)
def test_override_that_hydra_refuses_is_shown(cli: Cli, job: Path, override: str, says: str) -> None:
    err = cli.fails(2, "import", str(job), "runner.save_interval=3", override)
    assert says in err
    assert f"2 | {override}" in err


def test_json_lists_every_key(cli: Cli, contract: Callable[[str, str], Any], job: Path) -> None:
    out = cli.out("import", str(job), "--json")
    output = contract("import", out)
    assert (output["schema"], output["ok"]) == ("rlinf.import/1", True)
    (file,) = output["files"]
    assert file["counts"] == {"carried": 22, "renamed": 2, "not_needed": 2, "left_out": 2}
    assert len(file["keys"]) == 28
    moved = next(key for key in file["keys"] if key["key"] == "algorithm.auto_reset")
    assert (moved["outcome"], moved["paths"]) == ("renamed", ["env.train.auto_reset"])
    assert moved["place"].startswith(f"{job}:")
    assert file["validation"]["ok"] is True


def test_json_tells_of_a_file_that_is_none(cli: Cli, contract: Callable[[str, str], Any]) -> None:
    for name, message in (("ours.yaml", "an rlinf file already"), ("empty.yaml", "the file is empty")):
        out = cli.printed(2, "import", str(DATA / "bad" / name), "--json")
        assert not contract("import", out)["ok"]
        assert message in out
    for words in (["a.yaml", "b.yaml"], ["runner.max_steps=3"]):
        assert cli("import", *words).code == 2


def test_a_folder_is_a_table_of_its_jobs(cli: Cli, tmp_path: Path) -> None:
    ended = cli("import", str(DATA / "embodied"), "-o", str(tmp_path / "ours"), "--search-path", str(DATA / "shared"))
    # One of them asks for a simulator that there is none of.
    assert ended.code == 1
    rows = {line.split()[0]: line.split(maxsplit=6)[-1] for line in ended.out.splitlines()}
    assert rows["behavior_unsupported.yaml"] == "2 errors"
    assert rows["franka_real.yaml"] == "valid"
    assert "env/libero_goal.yaml" not in rows
    assert "fragments" in ended.err
    assert len(list((tmp_path / "ours").iterdir())) == len(rows) - 1


def test_a_folder_goes_on_after_a_bad_file(cli: Cli, tmp_path: Path, job: Path) -> None:
    (tmp_path / "broken.yaml").write_text("runner: [")
    assert "frankasim_async.yaml" in cli.printed(2, "import", str(tmp_path))
    assert job.with_name("frankasim_async.rlinf.yaml").exists()
    # What was converted is no job file of another project when the folder is converted again.
    again = cli("import", str(tmp_path), "--replace")
    assert ".rlinf.yaml" not in again.out


@pytest.mark.parametrize("out", [None, "ours", "."])
def test_a_folder_replaces_none_of_its_own_files(cli: Cli, tmp_path: Path, job: Path, out: str | None) -> None:
    twin = text_file(job.with_suffix(".yml"), job.read_text())
    target = () if out is None else ("-o", str(job.parent / out))
    ended = cli("import", str(job.parent), *target, "--replace")
    assert ended.code == 2
    assert ended.out.count("already exists") == (2 if out == "." else 1)
    assert job.read_text() == twin.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing_default.yaml", ["missing_default.yaml:2:5", "did you mean `model/openvla`?"]),
        ("cycle_a.yaml", ["cycle_b.yaml:2:5", "`cycle_a.yaml` -> `cycle_b.yaml` -> `cycle_a.yaml`"]),
        ("not_yaml.yaml", ["not_yaml.yaml:2:1", "tab"]),
        ("empty.yaml", ["the file is empty"]),
        ("strange_default.yaml", ["not a valid item of a defaults list"]),
        ("ours.yaml", ["an rlinf file already"]),
        ("nobodys.yaml", ["not a job file of RLinf or verl", "`lr`, `batch`"]),
        ("nowhere.yaml", ["no such file"]),
        ("model", ["no job file"]),
    ],
)
def test_bad_input_is_one_clear_error(cli: Cli, tmp_path: Path, name: str, words: list[str]) -> None:
    err = cli.refuses(2, "import", str(DATA / "bad" / name), "-o", str(tmp_path / "out.yaml"))
    assert [word for word in words if word not in err] == []
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("defaults", "overrides", "words"),
    [
        ("[{g: '${oc.env:TOKEN}'}]", [], ["job.yaml:1:12", "not a valid item of a defaults list"]),
        ("[{g: '???'}]", [], ["You must specify 'g'", "Available options"]),
        ("[{override g: x}]", [], ["Could not override 'g'. No match in the defaults list"]),
        ("[{g: x}]", ["g=x,y"], ["a sweep over several jobs cannot be imported"]),
        ("[{g: x}]", ["g='"], ["`g='` is not an override in Hydra's syntax"]),
        ("[{'@p': x}]", [], ["not a valid item of a defaults list"]),
        ("[{g: many}]", [], ["the defaults lists name more than 500 files"]),
    ],
)
def test_defaults_that_hydra_refuses_are_one_error(
    cli: Cli, tmp_path: Path, defaults: str, overrides: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret-token")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "x.yaml").write_text("a: 1")
    (tmp_path / "g" / "many.yaml").write_text(f"defaults: [{', '.join(['x'] * 600)}]")
    (tmp_path / "job.yaml").write_text(f"defaults: {defaults}\nrunner: {{task_type: embodied}}\n")
    ended = cli("import", str(tmp_path / "job.yaml"), *overrides)
    assert ended.code == 2
    for word in words:
        assert word in ended.err
    assert "secret-token" not in ended.err + ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "job.yaml"]


def test_import_without_hydra_names_the_package(cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_core.process.requirements.missing_modules", lambda names: [*names])
    ended = cli("import", str(job))
    assert ended.code != 0
    assert "`rlinf import` needs the package hydra-core" in ended.err
    assert "'hydra-core>=1.3,<1.4'" in ended.err
    assert [path.name for path in job.parent.iterdir()] == [job.name]


def test_what_no_recipe_does_is_refused(cli: Cli, tmp_path: Path) -> None:
    file = text_file(tmp_path / "job.yaml", "runner: {task_type: sft}\nactor: {model: {model_type: qwen2.5_vl}}\n")
    assert "not converted" in cli.fails(2, "import", str(file), "-o", str(tmp_path / "out.yaml"))
    assert not (tmp_path / "out.yaml").exists()


def test_a_folder_that_cannot_be_searched_is_warned_of(cli: Cli) -> None:
    ended = cli("import", str(DATA / "embodied" / "maniskill_ppo_mlp.yaml"), "-o", "-")
    assert "the environment has no variable `EMBODIED_CONFIGS`" in ended.err
    assert ended.code == 0


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: lots}, rollout: {n: [1], name: 3}}\nalgorithm: null\n"
        "trainer: {nnodes: two, n_gpus_per_node: -1, logger: {a: 1}, save_freq: x}\ndata: 3\n",
        "runner: 3\ncluster: [1]\nactor: {model: [a], lr_sched: 4}\nenv: {train: 3}\nalgorithm: {a: {b: [[1, 2]]}}\n",
        "runner: {a: '${runner}', b: '${.b}', c: '${'}\ncluster: {num_nodes: '${nothing}'}\nenv: {}\n",
    ],
)
def test_values_of_the_wrong_kind_are_told_and_nothing_breaks(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    ended = cli("import", str(tmp_path / "odd.yaml"), "--json")
    assert ended.code == 1, ended.err
    (file,) = json.loads(ended.out)["files"]
    assert not file["valid"]
    written = (tmp_path / "odd.rlinf.yaml").read_text()
    for key in file["keys"]:
        if key["outcome"] in ("left_out", "not_needed"):
            assert f"#     {key['key']}: " in written


@pytest.mark.parametrize(
    ("name", "text"), [("run_grpo.sh", "python3 -m verl.trainer.main_ppo a.b=1\n"), ("job", "#!/bin/sh\nexit 1\n")]
)
def test_script_is_answered_with_the_command_that_writes_its_job(
    cli: Cli, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    for target in (tmp_path / name, *([tmp_path] if name.endswith(".sh") else [])):
        assert f"`bash {tmp_path / name} --cfg job > job.yaml`" in cli.fails(2, "import", str(target)).replace(
            "\n", " "
        )
    assert cli("import", str(tmp_path / name), "--json").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
