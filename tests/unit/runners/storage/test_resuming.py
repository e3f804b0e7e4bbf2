"""Going on with a run: what is resumed, what is noted of it, and the first contact with its folder."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from recipes.training import comparing_worker
from recipes.training.comparing_worker import comparisons_of
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.first_contact import (
    FILE,
    SKIPPED,
    ContactCheck,
    Difference,
    FirstContact,
    note_comparisons,
    read_comparisons,
)
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
    "advantages": (
        "algorithm.options.gae_lambda=0.9",
        "algorithm.options.gae_lambda=0.8",
        "",
        "algorithm.options.gae_lambda",
    ),
    "staleness": ("runner.max_staleness=1", "", "runner.max_staleness=2", "runner.max_staleness"),
    "recipe": ("file=math/sums-laptop", "", "file=agent/calculator-laptop", "recipe"),
}


def text_of(*overrides: str) -> str:
    """The resolved configuration of `embodied/pick-laptop.yaml`, or of `file=NAME`, with overrides."""
    words = [override for override in overrides if override and not override.startswith("file=")]
    (name,) = [override.removeprefix("file=") for override in overrides if override.startswith("file=")] or [
        "embodied/pick-laptop"
    ]
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


def test_run_that_auto_cannot_consider_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = started(tmp_path, text_of())
    saved(run, 3, 1.0)
    (run.path / "run.json").write_text('{"schema": "rlinf.run/1", "sta')
    assert started(tmp_path, text_of(), resume_dir="auto").resumed_from is None
    assert f"cannot consider {run.path}: `run.json`" in caplog.text


def test_folder_of_runs_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="the folder of runs cannot be read"):
        started(tmp_path / "runs", text_of(), resume_dir="auto")


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


def test_a_run_that_has_the_keys_of_an_earlier_release_matches(tmp_path: Path) -> None:
    of_env = {"simulator_timeout": 100.0, "reset_each_pass": None, "mask_after_success": False}
    of_algorithm = {"gae_lambda": 0.95, "value_clip": None, "critic_warmup_steps": 0, "normalize_advantages": True}
    texts = [yaml.safe_load(text_of(f"actor.seed={seed}")) for seed in (1, 2)]
    for text in texts:
        text["env"]["train"] |= of_env
        text["algorithm"] |= of_algorithm
        text["actor"]["model"] |= {"is_lora": False, "lora_rank": 16}
    runs = [started(tmp_path, yaml.safe_dump(text)) for text in texts]
    for run in runs:
        saved(run, 3, 1.0)
    assert started(tmp_path, text_of("actor.seed=1"), resume_dir="auto").path == runs[0].path
    with pytest.raises(CheckpointError, match=r"`actor\.seed` is `2` there") as raised:
        started(tmp_path, text_of("actor.seed=3"), resume_dir="auto")
    assert "lora" not in str(raised.value)


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


def test_a_comparison_keeps_what_it_found_and_its_time() -> None:
    contact = FirstContact("actor")
    contact.compare("logits", "transformers", lambda: Difference(1e-5, 1e-3, "48 tokens"))
    contact.compare("golds", "rule", lambda: None)
    contact.keep("rows", "their keys")
    logits, rows = contact.take()
    assert (logits.component, logits.verdict, logits.largest_difference, logits.bound) == (
        "actor",
        "agrees",
        1e-5,
        1e-3,
    )
    assert logits.seconds is not None
    assert logits.seconds >= 0
    assert (rows.what, rows.seconds) == ("rows", None)
    assert contact.take() == []


def test_expensive_comparisons_are_skipped_and_named() -> None:
    contact, made = FirstContact("actor", skips=True), list[str]()
    contact.compare("logits", "transformers", lambda: made.append("logits"))
    contact.compare("template", "roles", lambda: made.append("template") or Difference(), cheap=True)
    assert made == ["template"]
    assert [(check.what, check.verdict, check.note) for check in contact.take()] == [
        ("logits", "skipped", SKIPPED),
        ("template", "agrees", ""),
    ]


def test_processes_that_compare_the_same_have_one_line(tmp_path: Path) -> None:
    ranks = [
        ContactCheck("actor", "logits", "transformers", "agrees", 1e-5, 1e-3, 0.5),
        ContactCheck("actor", "logits", "transformers", "agrees", 1e-4, 1e-3, 0.25),
        ContactCheck("reward", "golds", "rule", "differs", note="1 of 8"),
        ContactCheck("reward", "golds", "rule", note="8"),
    ]
    note_comparisons(tmp_path, ranks)
    logits, golds = read_comparisons(tmp_path)
    assert (logits.largest_difference, logits.seconds) == (1e-4, 0.5)
    assert (golds.verdict, golds.note) == ("differs", "1 of 8")
    content = json.loads((tmp_path / FILE).read_text())
    assert (content["seconds"], content["skipped"], content["checks"][0]["with"]) == (0.5, 0, "transformers")


def test_a_later_comparison_replaces_an_earlier_one(tmp_path: Path) -> None:
    note_comparisons(tmp_path, [ContactCheck("env", "actions", "range", "differs"), ContactCheck("env", "a", "b")])
    note_comparisons(tmp_path, [ContactCheck("env", "actions", "range")])
    assert {check.what: check.verdict for check in read_comparisons(tmp_path)} == {"actions": "agrees", "a": "agrees"}


def test_a_difference_that_is_no_number_is_written(tmp_path: Path) -> None:
    contact = FirstContact("actor")
    contact.keep("logits", "transformers", Difference(math.nan, 1e-3, "48 tokens", agrees=False))
    note_comparisons(tmp_path, contact.take())
    (check,) = read_comparisons(tmp_path)
    assert (check.verdict, check.largest_difference, check.note) == (
        "differs",
        None,
        "the difference is nan; 48 tokens",
    )


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"what": 3}',
        '{"schema": "rlinf.first_contact/1", "checks": 3}',
        '{"schema": "rlinf.first_contact/1", "checks": [3, {"what": "x"}, {"component": "a", "what": "x", "with": "y",'
        ' "verdict": "fine", "note": ""}]}',
    ],
)
def test_a_file_of_another_shape_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_comparisons(tmp_path) == []


def test_groups_that_never_compare_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [[ContactCheck("actor", "a", "b")], [ContactCheck("actor", "c", "d")]]
    group: Any = SimpleNamespace(compared=lambda: SimpleNamespace(wait=lambda: checks))
    monkeypatch.setattr(comparing_worker, "wait_together", lambda *calls: [call.wait() for call in calls])
    assert [check.what for check in comparisons_of([object(), group])] == ["a", "c"]


def test_events_come_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    assert run_events.story_with_faults(tmp_path) == ([], [])
    run_events.append_event(tmp_path, run_events.STARTED, 0, "started: actor 1")
    run_events.append_event(tmp_path, run_events.FAILED, 7, "`env:0` died", ["why: killed", "do: look"])
    with (tmp_path / run_events.EVENTS).open("a") as file:
        file.write('{"time": 1, "kind"')
    (started, failed), faults = run_events.story_with_faults(tmp_path)
    assert (started.kind, started.step, started.text, started.details) == ("started", 0, "started: actor 1", ())
    assert failed.details == ("why: killed", "do: look")
    assert started.time <= failed.time
    assert faults == []


def test_half_of_a_character_does_not_hide_an_event(tmp_path: Path) -> None:
    run_events.append_event(tmp_path, run_events.FAILED, 1, "no file \udcff", ["where: \ud800"])
    (event,), faults = run_events.story_with_faults(tmp_path)
    assert (event.text, event.details, faults) == ("no file \\udcff", ("where: \\ud800",), [])


def test_text_with_other_line_separators_is_one_event(tmp_path: Path) -> None:
    text = "ValueError: one\u2028two\x85three\x0bfour"
    run_events.append_event(tmp_path, run_events.FAILED, 1, text)
    (event,), faults = run_events.story_with_faults(tmp_path)
    assert (event.text, faults) == (text, [])


def test_invalid_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    run_events.append_event(tmp_path, run_events.STARTED, 0, "started")
    with (tmp_path / run_events.EVENTS).open("ab") as file:
        file.write(b'{"time": 1, "kind": "failed", "step": -1, "text": "", "details": []}\nnot JSON\n\xff\n')
    run_events.append_event(tmp_path, run_events.FINISHED, 3, "finished")
    story, faults = run_events.story_with_faults(tmp_path)
    assert [event.kind for event in story] == ["started", "finished"]
    assert [fault.partition(" of ")[0] for fault in faults] == ["line 2", "line 3", "line 4"]
    assert "`step` is `-1`" in faults[0]


def test_file_that_is_no_list_of_events_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / run_events.EVENTS
    os.mkfifo(path)
    assert run_events.story_with_faults(tmp_path) == (
        [],
        ["events.jsonl cannot be read: it is a pipe, not a regular file"],
    )
    path.unlink()
    path.touch()
    os.truncate(path, 65 << 20)
    assert run_events.story_with_faults(tmp_path) == ([], ["events.jsonl cannot be read: it is larger than 64 MiB"])
