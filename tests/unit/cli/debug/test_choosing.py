"""The processes that words of `rlinf debug` name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.debug.attaching import chosen_processes, components_of, run_and_processes
from rlinf_core.config.sections.runner import LoggerConfig, RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.run_folder import RunFolder

NAMES = ("driver", "EnvGroup:0", "EnvGroup:1", "EnvGroup:10", "ActorGroup:0")
GROUPS = {"env": "EnvGroup", "actor": "ActorGroup"}


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), NAMES),
        (("EnvGroup:1",), ("EnvGroup:1",)),
        (("env:1",), ("EnvGroup:1",)),
        (("env",), ("EnvGroup:0", "EnvGroup:1", "EnvGroup:10")),
        (("actor", "driver", "ActorGroup:0"), ("ActorGroup:0", "driver")),
    ],
)
def test_words_choose_processes(words: tuple[str, ...], chosen: tuple[str, ...]) -> None:
    assert tuple(chosen_processes(NAMES, words, GROUPS, "job x")) == chosen


@pytest.mark.parametrize("word", ["EnvGroup:2", "Env", "env:", ""])
def test_unknown_word_is_refused(word: str) -> None:
    with pytest.raises(RunError, match=f"the job has no process `{word}`"):
        chosen_processes(NAMES, (word,), GROUPS, "job x")


def test_components_come_from_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    assert components_of(file) == {}
    file.write_text("env: {group_name: EnvGroup}\nactor: {group_name: A, lr: 1}\n", encoding="utf-8")
    assert components_of(file) == {"env": "EnvGroup", "actor": "A"}


@pytest.mark.parametrize("word", ["env:0", "env", "EnvGroup", "EnvGroup:1"])
def test_first_word_may_name_processes_of_the_active_run(tmp_path: Path, word: str) -> None:
    run = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "embodied")
    run.config_file.write_text("env: {group_name: EnvGroup}\n", encoding="utf-8")
    folder, words = run_and_processes(word, ["actor"], tmp_path)
    assert (folder.path, words) == (run.path, [word, "actor"])
    folder, words = run_and_processes(run.path.name, [word], tmp_path)
    assert (folder.path, words) == (run.path, [word])
    with pytest.raises(RunError, match="there is no run `evn:0`"):
        run_and_processes("evn:0", [], tmp_path)


def test_word_without_any_run_is_one_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run `env:0`"):
        run_and_processes("env:0", [], tmp_path)
