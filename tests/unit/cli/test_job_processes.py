"""`rlinf ps`: the processes of a job, their stacks, and which are meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rlinf_cli.job_processes import (
    chosen_processes,
    components_of,
    stacks_record,
    stacks_text,
    workers_record,
    workers_text,
)
from rlinf_cli.runs.run_lookup import choose_runs_folder, run_of_words
from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.config.sections.runner import LoggerConfig, RunnerConfig
from rlinf_core.errors import RunError, RuntimeFailure
from rlinf_core.node.process_life import ProcessIdentity
from rlinf_core.node.stacks import NOT_PYTHON, ProcessStacks, StackRequest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.supervision.job_view import (
    JobSnapshot,
    answers_of_both,
    helper_for,
    job_processes,
    waits_at_breakpoint,
)
from rlinf_core.supervision.lives import Hello, Life, WorkerRecord
from rlinf_core.supervision.waits import ProcessAnswer
from rlinf_core.waiting import Operation, OperationKind, Publication

CONTRACT = Path(__file__).parent / "contracts" / "debug.json"


def hello(pid: int, boot: str = "elsewhere") -> Hello:
    info = EndpointInfo("1", boot, 1, None, "127.0.0.1", 1, pid)
    return Hello(1, info, f"node 1 ({boot})", 1, process=ProcessIdentity(pid, f"{pid}:5", boot, boot, 7))


def answer(stacks: str, kind: OperationKind = OperationKind.METHOD, target: str = "run") -> ProcessAnswer:
    operation = Operation(kind, target, None, 12.0, 1)
    return ProcessAnswer(Publication((operation,), 1, True), stacks=stacks)


@pytest.fixture
def job() -> JobSnapshot:
    """The job of a worker that answers, one that does not, and one that has died; all on another machine."""
    names = ("env:0", "env:1", "env:2")
    workers: dict[str, Any] = {
        name: WorkerRecord(WorkerAddress.from_name(name), 1, life=Life.DEAD if name == "env:2" else Life.READY)
        for name in names
    }
    peers = {"env:0": hello(10), "env:1": hello(11)}
    return JobSnapshot("job", peers, workers, {"env:2": 3.0}, {"env:0": answer("thread MainThread:\n  File a")})


def read(helper: str, request: StackRequest) -> list[ProcessStacks]:
    assert helper == "env:0"
    child = ProcessStacks(20, 10, "python child", "signal", "thread x:\n  File b", "")
    other = ProcessStacks(21, 10, "ffmpeg", "", "", NOT_PYTHON)
    own = ProcessStacks(11, 0, "ray::env", "py-spy", "thread MainThread:\n  File c", "")
    return [own] if request.own else [child, other]


def names(job: JobSnapshot) -> list[str]:
    return list(job.workers)


def test_processes_are_shown_with_their_children(job: JobSnapshot) -> None:
    text = stacks_text(job_processes(job, names(job), native=False, remotely=read))
    assert text.splitlines() == [
        "env:0 (node 1 (elsewhere), pid 10): runs `run`, 12 s",
        "  thread MainThread:",
        "    File a",
        "env:0, its process 20 (python child)",
        "  read by a signal handler",
        "  thread x:",
        "    File b",
        "env:0, its process 21 (ffmpeg)",
        "  no stacks: it does not run Python",
        "",
        "env:1 (node 1 (elsewhere), pid 11): does not answer; native code may hold the GIL",
        "  read by py-spy",
        "  thread MainThread:",
        "    File c",
        "",
        "env:2: died: killed, or exited without an exception",
        "  no stacks: died: killed, or exited without an exception",
    ]


def test_record_keeps_its_contract(job: JobSnapshot) -> None:
    record = stacks_record("job", job_processes(job, names(job), native=False, remotely=read))
    Draft202012Validator(json.loads(CONTRACT.read_text(encoding="utf-8"))).validate(record)
    pairs = [(one["pid"], one["parent"]) for one in record["processes"]]
    assert pairs == [(10, None), (20, 10), (21, 10), (11, None), (None, None)]
    assert record["complete"] is False
    # A program that is not Python lacks nothing.
    (process,) = job_processes(job, ["env:0"], native=False, remotely=read)
    assert process.complete


def test_silent_process_that_nobody_reads_has_a_reason(job: JobSnapshot) -> None:
    def fail(helper: str, request: StackRequest) -> list[ProcessStacks]:
        raise RuntimeFailure("py-spy: Permission denied")

    (process,) = job_processes(job, ["env:1"], native=False, remotely=fail)
    assert (process.reason, process.complete) == ("py-spy: Permission denied", False)
    alone = replace(job, answers={})
    (process,) = job_processes(alone, ["env:1"], native=False, remotely=fail)
    assert process.reason == "no process of its machine answers, which could read its stacks"


def test_python_stacks_stay_where_native_ones_are_missing(job: JobSnapshot) -> None:
    def without(helper: str, request: StackRequest) -> list[ProcessStacks]:
        return [ProcessStacks(10, 0, "ray::env", "", "", "py-spy is not installed")]

    (process,) = job_processes(job, ["env:0"], native=True, remotely=without)
    assert (process.source, process.reason) == ("itself", "py-spy is not installed")
    assert "no native stacks: py-spy is not installed" in stacks_text([process])


def test_secrets_in_stacks_are_masked(job: JobSnapshot) -> None:
    secret = replace(job, answers={"env:0": answer("thread MainThread:\n  api_key = 'abcdefgh12345678'")})
    (process,) = job_processes(secret, ["env:0"], native=False, remotely=read)
    assert "abcdefgh12345678" not in process.stacks


def test_helper_is_of_the_same_machine() -> None:
    peers = {"a:0": hello(1, "one"), "b:0": hello(2, "two"), "b:1": hello(3, "two")}
    answering = ({"b:0", "b:1"}, {"a:0", "b:1"}, {"a:0"})
    assert [helper_for("b:0", peers, names) for names in answering] == ["b:0", "b:1", None]


def test_late_answers_are_kept(job: JobSnapshot) -> None:
    second = replace(job, peers={"env:1": job.peers["env:1"]}, answers={"env:1": answer("late")})
    assert set(answers_of_both(job, replace(second, peers=job.peers)).answers) == {"env:0", "env:1"}
    assert set(answers_of_both(job, second).answers) == {"env:1"}


def test_breakpoint_is_seen_in_the_answer(job: JobSnapshot) -> None:
    assert waits_at_breakpoint(job, "env:0") is None
    assert waits_at_breakpoint(job, "env:1") is None
    stopped = replace(job, answers={"env:0": answer("", OperationKind.BREAKPOINT, "x.py:3")})
    assert waits_at_breakpoint(stopped, "env:0") == "x.py:3"


def test_what_a_process_holds_is_below_its_line(job: JobSnapshot) -> None:
    held = ("holds 1 box", "box of a: echo \x1b[31m")
    job = replace(job, answers={"env:0": replace(job.answers["env:0"], holds=held)})
    lines = workers_text(job, ["env:0", "env:1"]).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("env:0"))
    assert [line.strip() for line in lines[first + 1 : first + 3]] == ["holds 1 box", "box of a: echo \\x1b[31m"]
    assert [worker["holds"] for worker in workers_record(job, ["env:0", "env:1"])["workers"]] == [held, ()]


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
    with pytest.raises(RunError, match="there is no run `env:0`"):
        run_of_words(["env:0"], lambda _: [])
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
