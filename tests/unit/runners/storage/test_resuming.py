"""`runner.resume_dir=auto`: it goes on with the run of the same configuration, or says what differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import CheckpointError
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.resuming import FREE_KEYS, config_id, differences, values_of
from rlinf_core.runners.storage.run_folder import RunFolder, config_text_of

# Two runs of one folder, as sweeps, seeds, sizes and recipes make them, a third one, and the key by which they differ.
PAIRS: dict[str, tuple[str, str, str, str]] = {
    "learning rate": ("actor.optim.lr=1e-4", "actor.optim.lr=3e-4", "actor.optim.lr=1e-3", "actor.optim.lr"),
    "discount": ("algorithm.gamma=0.5", "algorithm.gamma=0.9", "algorithm.gamma=1", "algorithm.gamma"),
    "clip": ("algorithm.clip_ratio_high=0.1", "", "algorithm.clip_ratio_high=0.3", "algorithm.clip_ratio_high"),
    "seed of training": ("env.train.seed=1", "env.train.seed=2", "", "env.train.seed"),
    "seed of the actor": ("actor.seed=1", "actor.seed=2", "actor.seed=3", "actor.seed"),
    "environments": ("env.train.total_num_envs=16", "", "env.train.total_num_envs=32", "env.train.total_num_envs"),
    "layer size": ("actor.model.hidden_dim=64", "", "actor.model.hidden_dim=32", "actor.model.hidden_dim"),
    "updates": ("algorithm.update_epoch=1", "algorithm.update_epoch=2", "", "algorithm.update_epoch"),
    "task": ("env.train.task=reach", "", "env.train.task=place", "env.train.task"),
    "advantages": ("algorithm.gae_lambda=0.9", "algorithm.gae_lambda=0.8", "", "algorithm.gae_lambda"),
    "staleness": ("runner.max_staleness=1", "", "runner.max_staleness=2", "runner.max_staleness"),
    "recipe": ("file=math_laptop", "", "file=agent_calculator", "recipe"),
}


def text_of(*overrides: str) -> str:
    """The resolved configuration of `laptop.yaml`, or of `file=NAME`, with overrides."""
    words = [override for override in overrides if override and not override.startswith("file=")]
    (name,) = [override.removeprefix("file=") for override in overrides if override.startswith("file=")] or ["laptop"]
    job = load_job(name, words)
    assert job.config is not None, [diagnostic.message for diagnostic in job.diagnostics]
    return config_text_of(job)


def started(folder: Path, text: str, **runner: Any) -> RunFolder:
    config = RunnerConfig.model_validate({**runner, "logger": {"log_path": str(folder), "experiment_name": "sweep"}})
    run = RunFolder.create(config, "embodied", config_text=text)
    run.write_config_text(text)
    return run


def saved(run: RunFolder, step: int, time: float) -> None:
    run.checkpoints.begin(step)
    run.checkpoints.commit(step, Manifest(step=step, time=time))
    run.end("interrupted")


@pytest.mark.parametrize("pair", PAIRS)
def test_auto_goes_on_with_the_right_one_of_two_runs_or_refuses(pair: str, tmp_path: Path) -> None:
    first, second, third, key = PAIRS[pair]
    runs = [started(tmp_path, text_of(item)) for item in (first, second)]
    for number, run in enumerate(runs):
        saved(run, 3 + number, time=100.0 + number)
    extra = ("runner.max_steps=900", "runner.save_interval=7", "runner.logger.project_name=other", "runner.trace=true")
    for run, overrides in zip(runs, (first, second), strict=True):
        again = started(tmp_path, text_of(overrides, *extra), resume_dir="auto")
        assert again.path == run.path
        again.end("interrupted")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="finds no run of this configuration") as raised:
        started(tmp_path, text_of(third), resume_dir="auto")
    for run in runs:
        assert re.search(rf"{re.escape(str(run.path))}: .*`{key}", str(raised.value))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_newest_of_equal_runs_is_taken(tmp_path: Path) -> None:
    runs = [started(tmp_path, text_of()) for _ in range(3)]
    for run, time in zip(runs, (5.0, 9.0, 7.0), strict=True):
        saved(run, 3, time)
    assert started(tmp_path, text_of(), resume_dir="auto").path == runs[1].path


def test_highest_step_of_a_run_is_its_newest_after_a_clock_jump(tmp_path: Path) -> None:
    run, other = (started(tmp_path, text_of()) for _ in range(2))
    saved(other, 9, 50.0)
    # The clock was set back between the two.
    for step, time in ((3, 100.0), (6, 60.0)):
        saved(run, step, time)
    again = started(tmp_path, text_of(), resume_dir="auto")
    assert (again.path, again.resumed_from) == (run.path, run.path / "checkpoints" / "global_step_6")


def test_run_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    other = started(tmp_path, text_of("actor.seed=1"))
    saved(other, 3, 1.0)
    own = started(tmp_path, text_of())
    own.end("interrupted")
    again = started(tmp_path, text_of(), resume_dir="auto")
    assert again.path not in (other.path, own.path)
    assert again.resumed_from is None


def test_runs_of_an_earlier_rlinf_match_by_configuration(tmp_path: Path) -> None:
    runs = [started(tmp_path, text_of(f"actor.seed={seed}")) for seed in (1, 2)]
    for run in runs:
        saved(run, 3, 1.0)
        run.update(config_id="")
    assert started(tmp_path, text_of("actor.seed=1"), resume_dir="auto").path == runs[0].path


def test_a_run_that_kept_several_components_in_one_key_matches(tmp_path: Path) -> None:
    placed = "recipe: a\ncluster: {{component_placement: {{{}}}}}\n"
    texts = [placed.format("'actor, env': 0-3"), placed.format("actor: 0-3, env: 0-3")]
    run = started(tmp_path, texts[0])
    saved(run, 3, 1.0)
    run.update(config_id="0123456789abcdef")
    assert started(tmp_path, texts[1], resume_dir="auto").path == run.path


def test_one_whose_configuration_is_gone_is_named(tmp_path: Path) -> None:
    run = started(tmp_path, text_of())
    saved(run, 3, 1.0)
    run.update(config_id="")
    run.config_file.unlink()
    with pytest.raises(CheckpointError, match="its configuration cannot be read"):
        started(tmp_path, text_of(), resume_dir="auto")


def test_a_run_that_is_named_may_be_of_another_configuration(tmp_path: Path) -> None:
    run = started(tmp_path, text_of("actor.seed=1"))
    saved(run, 3, 1.0)
    assert started(tmp_path, text_of("actor.seed=2"), resume_dir=str(run.path)).path == run.path


def test_one_number_written_in_two_ways_is_one_configuration() -> None:
    texts = [f"recipe: a\nrunner: {{max_steps: 3}}\nlr: {number}\n" for number in ("1", "1.0", "1e0")]
    assert len({config_id(values_of(text) or {}) for text in texts}) == 1


@pytest.mark.parametrize("text", ["- a", "{", "", "[" * 20_000, "a: !!python/object:os.system {}"])
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert values_of(text) is None


def test_what_differs_is_in_words() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == [
        "`b` is `2` there and `3` now",
        "`c` is not set there and `4` now",
    ]


def test_the_page_lists_the_free_keys() -> None:
    page = (Path(__file__).parents[4] / "docs" / "train.md").read_text(encoding="utf-8")
    assert [key for key in FREE_KEYS if f"`{key.rpartition('.')[2]}`" not in page] == []
