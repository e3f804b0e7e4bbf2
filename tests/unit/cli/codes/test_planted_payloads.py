"""A program in every file that can be received, one at a time, and every command over it: nothing of it runs.

Commands that start Ray are tried in tests/integration/cli/planted/test_planted_payloads.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.training.state import state_checkpoint
from rlinf_core import RLinfError, load_policy
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.resuming import find_source
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.payloads import PAYLOADS, code, plant
from tests.unit.cli.conftest import Cli
from tests.unit.cli.report_runs import full_run
from tests.unit.recipes.embodied.using.test_trained_policy import normalization

SPEC = EnvSpec(21, 8, has_instructions=True)


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything that a run leaves, and a checkpoint."""
    log_path = tmp_path_factory.mktemp("received")
    run = full_run(str(log_path))
    job = load_job("laptop", ("actor.model.hidden_dim=8",), environ={})
    run.write_config_text(resolved_text(job.tree, job.config))
    _checkpoint(run)
    return run.path


def _checkpoint(run: RunFolder) -> None:
    store = CheckpointStore(run.path / "checkpoints")
    folder, model = store.begin(1), policy_model({"hidden_dim": 8})
    policy = make_model(model, SPEC)
    policy.normalization = normalization(SPEC)
    state_checkpoint.save(folder, policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(folder, model, SPEC, policy.normalization)
    policy.normalization.save(folder)
    torch.save({"updates": 1}, folder / "learner.pt")
    store.commit(1, Manifest(step=1))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _resume(run: Path) -> None:
    """Read a checkpoint as `train` with `runner.resume_dir` does in the driver, and then in an actor."""
    source = find_source(str(run), run.parent, "full")
    assert source is not None
    policy = torch.nn.Linear(1, 1)
    state_checkpoint.load(source.path, policy, torch.optim.AdamW(policy.parameters()))


def _loads(run: Path) -> Iterator[Callable[[], object]]:
    """Yield the ways in which a checkpoint is loaded."""
    yield lambda: load_policy(run)
    yield lambda: load_policy(run / "checkpoints" / "global_step_1")
    yield lambda: _resume(run)


def _uses(cli: Cli, run: Path) -> Iterator[Callable[[], object]]:
    """Yield every use of a run folder that needs no Ray."""
    config, checkpoint = run / "config.yaml", run / "checkpoints" / "global_step_1"
    for arguments in (
        ("runs", "--runs-dir", run.parent),
        ("report", run),
        ("compare", run, run),
        ("report", "--samples", run),
        ("logs", run),
        ("stop", run),
        ("export", run, "-o", run.parent / "exported"),
        ("validate", config),
        ("validate", config, f"actor.checkpoint_load_path={checkpoint}"),
        ("validate", config, f"runner.resume_dir={run}"),
        *(("inspect", what, config) for what in ("config", "placement", "memory", "env")),
    ):
        yield lambda arguments=arguments: cli(*arguments)
    yield from _loads(run)


def use(cli: Cli, run: Path) -> None:
    """Use a run in every way; that it is refused is fine."""
    for action in _uses(cli, run):
        with contextlib.suppress(RLinfError):
            action()


def test_the_run_is_one_that_commands_accept(received: Path, cli: Cli) -> None:
    """The test below shows something only where commands get as far as to read the files."""
    load_policy(received)
    run, out = received, received.parent / "out"
    for arguments in (("runs", "--runs-dir", run.parent), ("report", run), ("export", run)):
        assert cli(*arguments, *(("-o", out) if arguments[0] == "export" else ())).code == 0, arguments
    shutil.rmtree(out)


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_nothing_in_a_checkpoint_runs(received: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    for number, name in enumerate(name for name in _files(received) if name.startswith("checkpoints/")):
        run = tmp_path / str(number)
        shutil.copytree(received, run)
        plant(run, name, PAYLOADS[kind](marker))
        for action in _loads(run):
            with contextlib.suppress(RLinfError):
                action()
        assert not marker.exists(), name


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_no_command_runs_what_is_in_a_file(
    received: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    marker = tmp_path / "marker"
    for number, name in enumerate(_files(received)):
        log_path = tmp_path / str(number)
        shutil.copytree(received.parent, log_path)
        run = log_path / received.name
        plant(run, name, PAYLOADS[kind](marker))
        monkeypatch.chdir(run)
        use(cli, run)
        monkeypatch.chdir(os.sep)
        assert not marker.exists(), name
        shutil.rmtree(log_path)


@pytest.mark.security
@pytest.mark.parametrize("start", [("rlinf",), ("python", "-m", "rlinf_cli")], ids=["script", "module"])
@pytest.mark.parametrize("path", [None, "."], ids=["unnamed", "named"])
def test_recipe_that_came_with_a_file_does_not_run(tmp_path: Path, start: tuple[str, ...], path: str | None) -> None:
    """Named or not: in the folder of the file lies a module, which is a recipe only where nobody names the folder."""
    marker = tmp_path / "marker"
    makes = "Recipe('x', 'X.', 'rlinf_core:JobConfig', 'x')" if path is None else "make_recipe()"
    (tmp_path / "came_along.py").write_text(f"{code(marker)}from rlinf_core import Recipe\nrecipe = {makes}\n")
    (tmp_path / "job.yaml").write_text("recipe: came_along:recipe\ncluster: {num_nodes: 1}\n")
    program, *arguments = start
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments, "validate", "job.yaml"],
        cwd=tmp_path,
        env=environment if path is None else {**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "error[unknown-recipe]" in done.stdout
    assert ("is in the working folder" if path is None else "is not a Recipe") in done.stdout
    assert not marker.exists()
