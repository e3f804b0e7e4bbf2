"""The processes that words of `rlinf ps` name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_cli.job_processes import chosen_processes, components_of
from rlinf_cli.runs.run_lookup import choose_runs_folder, run_of_words
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


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    choose_runs_folder(str(tmp_path))
    yield tmp_path
    choose_runs_folder(None)


@pytest.mark.parametrize("word", ["env:0", "env", "EnvGroup", "EnvGroup:1", ":0"])
def test_words_may_name_processes_of_the_active_run(runs: Path, word: str) -> None:
    run = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(runs))), "embodied")
    for words in ([word, "env"], [run.path.name, word, "env"], [word, "env", str(run.path)]):
        folder, processes = run_of_words(words, lambda _: ["env", "EnvGroup"])
        assert (folder.path, processes) == (run.path, [word, "env"])
    with pytest.raises(RunError, match="there is no run `evn:0`, and no such component") as error:
        run_of_words(["evn:0"], lambda _: ["env"])
    assert error.value.help == "did you mean `env`?"
    with pytest.raises(RunError, match="there is no run") as error:
        run_of_words([f"x{run.path.name}"], lambda _: ["env"])
    assert error.value.help == f"did you mean `{run.path.name}`?"


def test_word_without_any_run_is_one_that_does_not_exist(runs: Path) -> None:
    with pytest.raises(RunError, match="there is no run `env:0`"):
        run_of_words(["env:0"], lambda _: [])
