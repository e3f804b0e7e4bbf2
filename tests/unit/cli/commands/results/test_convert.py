"""`rlinf runs convert`, over a run that an earlier version wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.training.state.shard_files import shard_name
from rlinf_core import load_policy
from rlinf_core.errors import CheckpointError
from rlinf_core.node.process_identity import own_identity
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import load_manifest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE
from rlinf_core.runners.storage.run_status import RunStatus
from tests.golden.frozen import DATA
from tests.unit.cli.conftest import Cli

STEP = "checkpoints/global_step_2"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(DATA / "first", tmp_path / "runs" / "first")


def test_an_earlier_run_names_the_command_and_is_used_after_it(
    cli: Cli, contract: Callable[[str, str], Any], run: Path
) -> None:
    with pytest.raises(CheckpointError, match="written by an earlier rlinf"):
        load_policy(run)
    out = cli.printed(2, "validate", run / "config.yaml", f"runner.resume_dir={run}")
    assert "rlinf runs convert RUN" in out
    before = load_manifest(run / STEP)
    done = cli("runs", "convert", "first", "--json")
    assert (done.code, contract("runs-convert", done.out)["converted"]) == (0, [2])
    assert load_policy(run) is not None
    after = load_manifest(run / STEP)
    assert {name for name in before.files if not name.startswith("actor/")} < set(after.files)
    assert f"actor/{shard_name(1)}" in after.files
    kept = {"files", "digests"}
    assert after.model_dump(exclude=kept) == before.model_dump(exclude=kept)
    again = cli("runs", "convert", "first")
    assert (again.code, "no checkpoint is of an earlier version" in again.out) == (0, True)
    assert load_manifest(run / STEP) == after


def test_a_damaged_checkpoint_is_named_and_left(cli: Cli, run: Path) -> None:
    weights = run / STEP / "actor" / "__0_0.distcp"
    os.truncate(weights, 100)
    done = cli("runs", "convert", "first")
    assert "no undamaged checkpoint is of an earlier version" in done.out
    assert "global_step_2 is damaged" in " ".join(done.err.split())
    assert weights.stat().st_size == 100


def test_one_that_cannot_be_converted_is_as_it_was(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    before = load_manifest(run / STEP)
    monkeypatch.setattr("recipes.training.tensor_files.TensorFile.write", full)
    done = cli("runs", "convert", "first")
    assert done.code != 0
    assert "No space left on device" in " ".join(done.err.split())
    assert load_manifest(run / STEP) == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["global_step_2", "latest"]


def test_an_active_run_is_refused(cli: Cli, run: Path) -> None:
    RunFolder.open(run).update(status=RunStatus.RUNNING, **own_identity()._asdict())
    done = cli("runs", "convert", "first")
    assert done.code != 0
    assert "active run" in " ".join(done.err.split())
    assert (run / STEP / "actor" / ".metadata").exists()


def test_another_command_that_changes_the_run_is_not_disturbed(cli: Cli, run: Path) -> None:
    partial = run / "checkpoints" / ".writing-global_step_2"
    partial.mkdir()
    with durable.claimed(run / STATE) as ours:
        done = cli("runs", "convert", "first")
    assert ours
    assert done.code != 0
    assert "another command converts, resumes or deletes it" in " ".join(done.err.split())
    assert partial.exists()
    assert (run / STEP / "actor" / ".metadata").exists()


def test_a_conversion_killed_between_its_renames_is_repaired(cli: Cli, run: Path) -> None:
    (run / STEP).rename(run / "checkpoints" / ".replaced-global_step_2")
    (run / "checkpoints" / ".writing-global_step_2").mkdir()
    assert cli("runs", "convert", "first").code == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["global_step_2", "latest"]
    assert load_policy(run) is not None


def test_a_checkpoint_that_is_a_link_is_refused(cli: Cli, run: Path, tmp_path: Path) -> None:
    (run / STEP).rename(tmp_path / "theirs")
    (run / STEP).symlink_to(tmp_path / "theirs")
    done = cli("runs", "convert", "first")
    assert done.code != 0
    assert "it is a link" in " ".join(done.err.split())
    assert (run / STEP).is_symlink()
    assert (tmp_path / "theirs" / "actor" / ".metadata").exists()


def test_a_changed_checkpoint_stops_no_other(cli: Cli, contract: Callable[[str, str], Any], run: Path) -> None:
    changed = shutil.copytree(run / STEP, run / "checkpoints" / "global_step_1")
    weights = changed / "actor" / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = cli("runs", "convert", "first", "--json")
    record = contract("runs-convert", done.out)
    assert done.code != 0
    assert (record["converted"], len(record["damaged_checkpoints"])) == ([2], 1)
    assert "global_step_1 is damaged: `actor/__0_0.distcp` was changed" in " ".join(done.err.split())
    assert weights.read_bytes() == content
