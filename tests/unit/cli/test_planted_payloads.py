"""A program in every file that can be received, one at a time, and every command over it: nothing of it runs.

Commands that start Ray are tried in tests/integration/cli/test_planted_payloads.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.training.state import state_checkpoint
from rlinf_core import RLinfError, load_policy
from rlinf_core.runners.storage.checkpoint import CheckpointStore, Manifest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import find_source
from tests.payloads import PAYLOADS, plant
from tests.unit.cli.conftest import Cli
from tests.unit.cli.report_runs import full_run
from tests.unit.recipes.embodied.test_trained_policy import STATES, normalization

FILE = "recipe: embodied\nactor: {model: {hidden_dim: 8}}\nenv: {train: {task: reach}, eval: {task: reach}}\n"


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has everything that a run leaves, `one/run`, and a checkpoint."""
    log_path = tmp_path_factory.mktemp("received")
    run = full_run(str(log_path))
    run.config_file.write_text(FILE)
    _checkpoint(run)
    return log_path


def _checkpoint(run: RunFolder) -> None:
    from recipes.embodied.config import EmbodiedModelConfig

    store = CheckpointStore(run.path / "checkpoints")
    folder, model = store.begin(1), EmbodiedModelConfig.model_validate({"hidden_dim": 8})
    policy = make_model(model, STATES)
    policy.normalization = normalization(STATES)
    state_checkpoint.save(folder, policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(folder, model, STATES, policy.normalization)
    policy.normalization.save(folder)
    torch.save({"updates": 1}, folder / "learner.pt")
    store.commit(1, Manifest(1))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _resume(run: Path) -> None:
    """Read a checkpoint as `train` with `runner.resume_dir` does in the driver, and then in an actor."""
    source = find_source(str(run), run.parent, "full")
    assert source is not None
    policy = torch.nn.Linear(1, 1)
    state_checkpoint.load(source.path, policy, torch.optim.AdamW(policy.parameters()))


def _uses(cli: Cli, run: Path) -> Iterator[Callable[[], object]]:
    """Yield every use of a run folder that needs no Ray."""
    config, checkpoint = run / "config.yaml", run / "checkpoints" / "global_step_1"
    for arguments in (
        ("runs", "--log-path", run.parent),
        ("report", run),
        ("compare", run, run),
        ("samples", run),
        ("logs", run),
        ("stop", run),
        ("export", run, "--out", run.parent / "exported"),
        ("validate", config),
        ("validate", config, f"actor.checkpoint_load_path={checkpoint}"),
        ("validate", config, f"runner.resume_dir={run}"),
        *(("inspect", what, config) for what in ("config", "placement", "memory", "env")),
    ):
        yield lambda arguments=arguments: cli(*arguments)
    yield lambda: load_policy(run)
    yield lambda: load_policy(checkpoint)
    yield lambda: _resume(run)


def use(cli: Cli, run: Path) -> None:
    """Use a run in every way; that it is refused is fine."""
    for action in _uses(cli, run):
        with contextlib.suppress(RLinfError):
            action()


def test_the_run_is_one_that_commands_accept(received: Path, cli: Cli) -> None:
    """The test below shows something only where commands get as far as to read the files."""
    run = received / "full"
    load_policy(run)
    for arguments in (("runs", "--log-path", received), ("report", run), ("samples", run), ("export", run)):
        assert cli(*arguments, *(("--out", received / "out") if arguments[0] == "export" else ())).code == 0, arguments


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_nothing_in_a_file_runs(
    received: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    marker = tmp_path / "marker"
    everyday = ("checkpoints/", "config.yaml", "run.json")
    for number, name in enumerate(name for name in _files(received / "full") if name.startswith(everyday)):
        log_path = tmp_path / str(number)
        shutil.copytree(received, log_path)
        run = log_path / "full"
        plant(run, name, PAYLOADS[kind](marker))
        monkeypatch.chdir(run)
        use(cli, run)
        monkeypatch.chdir(os.sep)
        assert not marker.exists(), name
        shutil.rmtree(log_path)
