"""`rlinf eval` and `rlinf export`; damaged checkpoints, and those of an earlier version."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.training.weights import training_state
from recipes.training.weights.shard_files import shard_name
from rlinf_cli.job.job_file import without_start, without_training_data
from rlinf_cli.run.policies import checkpoint_of
from rlinf_cli.runs.run_lookup import find_run_folder
from rlinf_core import RLinfError, load_policy
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.job.load import load_job
from rlinf_core.node.process_life import own_identity
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Manifest, load_manifest
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.resuming import find_source
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE
from rlinf_core.runners.storage.run_status import RunStatus
from tests.golden.frozen import DATA
from tests.unit.cli.report_runs import full_run
from tests.unit.cli.typed import Cli
from tests.unit.recipes.embodied.using.test_trained_policy import normalization

Returning = Callable[[str, Mapping[str, Any]], None]
SUCCESS = {f"success_{when}{form}": value for when in ("at_end", "once")
           for form, value in (("", 11 / 15), ("_interval", [0.48, 0.89]))}  # fmt: skip
FIGURES = {"episodes": 15, **SUCCESS, "outcomes": {"success": 11, "error": 4}, "return": 0.5, "episode_len": 30.0}
SHARES = {"problems": 40.0, "pass@1": 0.0, "pass@1_low": 0.0, "pass@1_high": 0.09, "reward": 0.0, "length": 6.0}
COUNTS = {"answers": 160.0, "cut_off": 160.0, "left_out": 0.0}


@pytest.fixture
def returning(monkeypatch: pytest.MonkeyPatch) -> Returning:
    def set_up(module: str, result: Mapping[str, Any]) -> None:
        monkeypatch.setattr(f"{module}.evaluate", lambda *_, **__: result)

    return set_up


def episodes(**fields: Any) -> dict[str, Any]:
    return {"tasks": {"pick": FIGURES}, "total": FIGURES, "left_out": 0, "env_errors": [], "videos": [], **fields}


def answers(left_out: int) -> dict[str, Any]:
    whole = {**SHARES, **COUNTS, "left_out": float(left_out), "answers": 160.0 - left_out, "cut_off": 160.0 - left_out}
    return {"sets": {"all": whole}, "sampling": {"max_new_tokens": 6}, "left_out": left_out}


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize("left_out", [0, 1])
def test_an_evaluation_of_episodes_that_lacks_some_ends_with_one(
    left_out: int, output: str, cli: Cli, returning: Returning, tmp_path: Path
) -> None:
    returning("recipes.embodied.using.evaluation", episodes(left_out=left_out))
    ended = cli("eval", "embodied/pick-laptop", "-o", tmp_path / "out", "--output", output)
    assert ended.code == left_out
    if output == "text":
        assert ("15, 1 left out" in ended.out) == bool(left_out)
        assert ("incomplete: 1 of 16 episodes were left out" in ended.err) == bool(left_out)


def test_errors_of_the_environment_are_told_with_their_line(cli: Cli, returning: Returning, tmp_path: Path) -> None:
    returning("recipes.embodied.using.evaluation", episodes(env_errors=["raised RuntimeError at ship.py:25 in step"]))
    ended = cli("eval", "embodied/pick-laptop", "-o", tmp_path / "out")
    assert ended.code == 0
    assert "4 episodes count as failed, by an error of the environment: raised RuntimeError at ship.py:25" in ended.err


@pytest.mark.parametrize("left_out", [0, 3])
def test_answers_that_are_cut_off_or_left_out_are_counted(
    left_out: int, cli: Cli, returning: Returning, tmp_path: Path
) -> None:
    returning("recipes.language.trained_models", answers(left_out))
    ended = cli("eval", "math/eval", "-o", tmp_path / "out")
    assert ended.code == bool(left_out)
    kept = 160 - left_out
    assert f"{kept} of {kept} answers cut off at max_new_tokens=6" in ended.err
    header, row = ended.out.splitlines()
    assert "cut off" in header
    assert row.endswith(f"{kept} of {kept}")
    assert ("left out" in header) == bool(left_out)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("eval embodied/pick-laptop runner.resume_dir=runs/one", "`--checkpoint runs/one`"),
        ("eval math/eval runner.resume_dir=runs/one", "`--checkpoint runs/one`"),
        ("eval embodied/pick-laptop runner.resume_dir=auto", "`--checkpoint RUN`"),
        ("play embodied/pick-laptop runner.resume_dir=runs/one", "`--checkpoint runs/one`"),
        ("record embodied/pick-laptop runner.resume_dir=runs/one", "`--checkpoint runs/one`"),
        ("eval embodied/pick-laptop runner.max_steps=5", "`runner.max_steps` has no effect on `rlinf eval`"),
        ("eval math/eval actor.optim.lr=0.1", "`actor.optim.lr` has no effect on `rlinf eval`"),
        ("record embodied/pick-laptop algorithm.gamma=0.9", "`algorithm.gamma` has no effect on `rlinf record`"),
        ("record embodied/pick-laptop env.eval.seed=7", "write `env.train.seed`"),
        ("play embodied/pick-laptop runner.save_interval=5", "has no effect on `rlinf play`"),
        ("record embodied/pick-laptop actor.checkpoint_load_path=runs/one", "name the weights with `--checkpoint`"),
        ("eval embodied/pick-laptop --checkpoint x actor.checkpoint_load_path=y", "no effect on `rlinf eval`"),
        ("eval job.yaml", "--checkpoint runs/one"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(
    typed: str, says: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "job.yaml").write_text("extends: embodied/pick-laptop\nrunner: {resume_dir: runs/one}\n")
    assert says in cli.fails(2, *typed.split())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("unheard-of", "there is no recipe `unheard-of`"), ("math", "`cluster`")],
)
def test_a_run_that_cannot_be_exported_says_why(cli: Cli, tmp_path: Path, recipe: str, message: str) -> None:
    logger = {"experiment_name": "one", "log_path": str(tmp_path)}
    run = RunFolder.create(RunnerConfig.model_validate({"logger": logger}), recipe)
    text = "recipe: unheard-of\n" if recipe == "unheard-of" else "recipe: math\ndata: {train_data_paths: problems}\n"
    run.write_config_text(text)
    ended = cli("export", run.path)
    assert ended.code != 0
    assert message in ended.err


@pytest.mark.parametrize(
    ("name", "overrides", "ok"),
    [
        ("sft/pick-laptop", ["data.train_data_paths=to/be/made"], True),
        ("sft/pick-laptop", ["data.train_data_paths=[]"], True),
        # It needs everything else of the file.
        ("sft/pick-laptop", ["data.train_data_paths=to/be/made", "data.normalization=all"], False),
        ("sft/pick-laptop", ["data.train_data_paths={path: a, episodes: [-1]}"], False),
        ("sft/pick-laptop", ["data.train_data_paths=to/be/made", "runner.resume_dir=not/there"], False),
        # A policy is used with what training refuses.
        ("math/sums-laptop", ["rollout.sampling_params.temperature=0"], True),
    ],
)
def test_a_recording_needs_no_file_that_only_training_reads(name: str, overrides: list[str], ok: bool) -> None:
    job = load_job(name, overrides)
    assert not job.ok
    assert without_training_data(job).ok is ok


@pytest.mark.parametrize("key", ["runner.resume_dir", "actor.checkpoint_load_path"])
def test_a_run_needs_no_checkpoint_that_it_began_from(key: str) -> None:
    job = without_training_data(load_job("sft/pick-laptop", ("data.train_data_paths=to/be/made", f"{key}=gone")))
    assert not job.ok
    assert without_start(job).ok


def test_a_folder_of_runs_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="this folder is not a run") as caught:
        find_run_folder("empty")
    assert caught.value.help == "name a run folder or a job file"
    (tmp_path / "embodied/pick-laptop").mkdir(parents=True)
    assert find_run_folder("embodied/pick-laptop") is None


SPEC = EnvSpec(21, 8, has_instructions=True)
WEIGHTS = f"actor/{shard_name(1)}"
MANIFEST = "manifest.json"


def flip(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut": (WEIGHTS, lambda path: os.truncate(path, 1000)),
    "missing": (WEIGHTS, Path.unlink),
    "empty": (MANIFEST, lambda path: path.write_text("")),
    "altered": (WEIGHTS, flip),
    "no manifest": (MANIFEST, Path.unlink),
    "altered manifest": (MANIFEST, lambda path: path.write_text('{"schema": "rlinf.checkpoint/1", "step": "2"}')),
}
# What sizes show, which is enough for tables.
SEEN = [name for name in DAMAGES if name != "altered"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 1 and 2."""
    run = full_run(str(tmp_path_factory.mktemp("sound")))
    job = load_job("embodied/pick-laptop", ("actor.model.hidden_dim=8",), environ={})
    assert job.tree is not None
    run.write_config_text(resolved_text(job.tree, job.config))
    model = policy_model({"hidden_dim": 8})
    store = CheckpointStore(run.path / "checkpoints")
    for step in (1, 2):
        folder, policy = store.begin(step), make_model(model, SPEC)
        policy.normalization = normalization(SPEC)
        training_state.save(folder, policy, torch.optim.AdamW(policy.parameters()), 1)
        write_description(folder, model, SPEC, policy.normalization)
        policy.normalization.save(folder)
        store.commit(step, Manifest(step=step))
    return run.path


@pytest.fixture
def run(sound: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the run whose checkpoint of step 2 has the damage of the parameter."""
    copy = tmp_path / "runs" / "damaged"
    shutil.copytree(sound, copy)
    file, damage = DAMAGES[request.param]
    damage(copy / "checkpoints" / "global_step_2" / file)
    return copy


def is_named(text: str) -> bool:
    words = " ".join(text.split())
    return words.count("is damaged") == 1 and "global_step_2" in words and "step 1 is used instead" in words


def resumed_path(resume_dir: str, runs: Path) -> Path:
    source = find_source(resume_dir, runs, "full")
    assert source is not None
    return source.path


@pytest.mark.parametrize("run", DAMAGES, indirect=True)
def test_export_says_what_it_writes(cli: Cli, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    done = cli("export", run, "-o", out)
    assert (done.code, is_named(caplog.text)) == (0, True)
    assert "step    1" in done.out
    assert json.loads((out / "policy.json").read_text())["step"] == 1
    assert load_policy(out) is not None


@pytest.mark.parametrize("run", DAMAGES, indirect=True)
def test_each_way_to_weights_takes_the_same_checkpoint(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    ways: list[Callable[[], object]] = [
        lambda: resumed_path(str(run), run.parent),
        lambda: resumed_path("auto", run.parent),
        lambda: checkpoint_of(None, RunFolder.open(run)),
        lambda: checkpoint_of(str(run / "checkpoints"), None),
        lambda: load_policy(run) and run / "checkpoints" / "global_step_1",
    ]
    for way in ways:
        caplog.clear()
        assert str(way()).endswith("global_step_1")
        assert is_named(caplog.text)


@pytest.mark.parametrize("run", DAMAGES, indirect=True)
def test_a_damaged_checkpoint_that_is_named_is_refused(run: Path) -> None:
    path = str(run / "checkpoints" / "global_step_2")
    ways: list[Callable[[], object]] = [
        lambda: find_source(path, run.parent, "full"),
        lambda: checkpoint_of("2", RunFolder.open(run)),
        lambda: checkpoint_of(path, None),
        lambda: load_policy(path),
        lambda: load_policy(run, checkpoint=path),
    ]
    for way in ways:
        with pytest.raises(RLinfError) as caught:
            way()
        assert "global_step_2" in str(caught.value)


@pytest.mark.parametrize("run", SEEN, indirect=True)
def test_tables_and_causes_name_it(cli: Cli, contract: Callable[[str, str], object], run: Path, sound: Path) -> None:
    listed = cli("runs", "--runs-dir", run.parent)
    assert is_named(listed.err)
    data = json.loads(cli("runs", "--runs-dir", run.parent, "--json").out)
    assert is_named(*data["runs"][0]["damaged_checkpoints"])
    assert is_named(cli("compare", run, sound).err)
    compared = json.loads(cli("compare", run, sound, "--json").out)
    assert is_named(
        "".join(words for one in compared["sets"] for item in one["runs"] for words in item["damaged_checkpoints"])
    )


@pytest.mark.parametrize("run", DAMAGES, indirect=True)
def test_why_and_validate_name_it(cli: Cli, run: Path) -> None:
    assert is_named(cli("why", run).out)
    checked = cli("validate", "embodied/pick-laptop", "actor.model.hidden_dim=8", f"runner.resume_dir={run}")
    assert (checked.code, is_named(checked.out)) == (0, True)
    out = cli.printed(
        2, "validate", "embodied/pick-laptop", f"runner.resume_dir={run / 'checkpoints' / 'global_step_2'}"
    )
    assert "error[unusable-path]" in out
    out = cli.printed(2, "validate", "math/sums-laptop", f"runner.resume_dir={run}")
    assert "its run is of recipe `embodied`, this one of `math`" in out


@pytest.mark.parametrize("run", ["altered"], indirect=True)
def test_a_glance_reads_the_smallest_files_first(run: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    sizes = store.complete()[-1].manifest.files
    assert store.damaged(sum(sizes.values()) - 1) == []
    assert is_named(*store.damaged(sum(sizes.values())))


@pytest.mark.parametrize("run", ["cut"], indirect=True)
def test_where_no_checkpoint_is_sound(rlinf: Cli, run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "global_step_1" / MANIFEST).unlink()
    done = rlinf("export", run, "-o", tmp_path / "out")
    assert done.code != 0
    assert done.err.count("no other one is left") == 2
    assert "no sound checkpoint" in done.err
    shutil.rmtree(run / "checkpoints")
    for words in (("eval", run), ("export", run, "-o", tmp_path / "out")):
        assert "the run has saved no checkpoint" in rlinf(*words).err


STEP = "checkpoints/global_step_2"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(DATA / "first", tmp_path / "runs" / "first")


def test_an_earlier_run_names_the_command_and_is_used_after_it(
    cli: Cli, contract: Callable[[str, str], Any], earlier: Path
) -> None:
    with pytest.raises(CheckpointError, match="written by an earlier rlinf"):
        load_policy(earlier)
    out = cli.printed(2, "validate", earlier / "config.yaml", f"runner.resume_dir={earlier}")
    assert "rlinf runs convert RUN" in out
    before = load_manifest(earlier / STEP)
    done = cli("runs", "convert", "first", "--json")
    assert (done.code, contract("runs-convert", done.out)["converted"]) == (0, [2])
    assert load_policy(earlier) is not None
    after = load_manifest(earlier / STEP)
    assert {name for name in before.files if not name.startswith("actor/")} < set(after.files)
    assert f"actor/{shard_name(1)}" in after.files
    kept = {"files", "digests"}
    assert after.model_dump(exclude=kept) == before.model_dump(exclude=kept)
    again = cli("runs", "convert", "first")
    assert (again.code, "no checkpoint is of an earlier version" in again.out) == (0, True)
    assert load_manifest(earlier / STEP) == after


def refusal(cli: Cli) -> str:
    """Return why a run is not converted, in one line."""
    done = cli("runs", "convert", "first")
    assert done.code != 0
    return " ".join(done.err.split())


def test_one_that_cannot_be_converted_is_as_it_was(cli: Cli, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    before = load_manifest(earlier / STEP)
    monkeypatch.setattr("recipes.training.tensor_files.TensorFile.write", full)
    assert "No space left on device" in refusal(cli)
    assert load_manifest(earlier / STEP) == before
    assert sorted(path.name for path in (earlier / "checkpoints").iterdir()) == ["global_step_2", "latest"]


def test_a_damaged_checkpoint_is_named_and_left(cli: Cli, earlier: Path) -> None:
    weights = earlier / STEP / "actor" / "__0_0.distcp"
    os.truncate(weights, 100)
    done = cli("runs", "convert", "first")
    assert "no undamaged checkpoint is of an earlier version" in done.out
    assert "global_step_2 is damaged" in " ".join(done.err.split())
    assert weights.stat().st_size == 100


def test_a_run_in_use_is_refused(cli: Cli, earlier: Path) -> None:
    partial = earlier / "checkpoints" / ".writing-global_step_2"
    partial.mkdir()
    with durable.claimed(earlier / STATE) as ours:
        assert ours
        assert "another command converts, resumes or deletes it" in refusal(cli)
    assert partial.exists()
    RunFolder.open(earlier).update(status=RunStatus.RUNNING, **own_identity()._asdict())
    assert "active run" in refusal(cli)
    assert (earlier / STEP / "actor" / ".metadata").exists()


def test_a_checkpoint_that_is_a_link_is_refused(cli: Cli, earlier: Path, tmp_path: Path) -> None:
    (earlier / STEP).rename(tmp_path / "theirs")
    (earlier / STEP).symlink_to(tmp_path / "theirs")
    assert "it is a link" in refusal(cli)
    assert (earlier / STEP).is_symlink()
    assert (tmp_path / "theirs" / "actor" / ".metadata").exists()


def test_a_conversion_killed_between_its_renames_is_repaired(cli: Cli, earlier: Path) -> None:
    (earlier / STEP).rename(earlier / "checkpoints" / ".replaced-global_step_2")
    (earlier / "checkpoints" / ".writing-global_step_2").mkdir()
    assert cli("runs", "convert", "first").code == 0
    assert sorted(path.name for path in (earlier / "checkpoints").iterdir()) == ["global_step_2", "latest"]
    assert load_policy(earlier) is not None


def test_a_changed_checkpoint_stops_no_other(cli: Cli, contract: Callable[[str, str], Any], earlier: Path) -> None:
    changed = shutil.copytree(earlier / STEP, earlier / "checkpoints" / "global_step_1")
    weights = changed / "actor" / "__0_0.distcp"
    flip(weights, -1)
    content = weights.read_bytes()
    done = cli("runs", "convert", "first", "--json")
    record = contract("runs-convert", done.out)
    assert done.code != 0
    assert (record["converted"], len(record["damaged_checkpoints"])) == ([2], 1)
    assert "global_step_1 is damaged: `actor/__0_0.distcp` was changed" in " ".join(done.err.split())
    assert weights.read_bytes() == content
