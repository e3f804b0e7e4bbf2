"""Failures of a run: the evidence that is kept, and what is started again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.sections.runner import LoggerConfig, RestartLimit, RunnerConfig
from rlinf_core.errors import ChannelClosed, ProcessEnd, RLinfError, RuntimeFailure, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.process import known_secrets
from rlinf_core.runners import evidence
from rlinf_core.runners.events import Event, WorkersRelaunched
from rlinf_core.runners.evidence import evidence_line, keep_evidence
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Restart, Restarts, SnapshotSchedule, Suspects, all_deaths, reason_of
from rlinf_core.runners.run_program import Dead, Relaunching
from rlinf_core.runners.storage.run_events import EVIDENCE, FAILURE, MOST_BUNDLES, bundle_folders, read_bundles
from rlinf_core.runners.storage.run_folder import RunFolder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_number_counts_over_the_whole_run() -> None:
    clock = Clock()
    restarts = Restarts(RestartLimit(max=2), clock)
    assert restarts.allow("env") == Restart(1, 2)
    clock.now = 1e6
    assert restarts.allow("actor") == Restart(2, 2)
    assert restarts.allow("rollout") is None


def test_window_forgets_restarts_that_are_older() -> None:
    clock = Clock()
    restarts = Restarts(RestartLimit(max=2, within="10m"), clock)
    assert restarts.allow("env") == Restart(1, 2)
    clock.now = 500.0
    assert restarts.allow("env") == Restart(2, 2)
    assert restarts.allow("env") is None
    clock.now = 600.0
    assert restarts.allow("env") == Restart(2, 2)
    clock.now = 1099.0
    assert restarts.allow("env") is None


def test_window_is_one_for_each_component() -> None:
    restarts = Restarts(RestartLimit(max=1, within="1h"), Clock())
    assert restarts.allow("env") == Restart(1, 1)
    assert restarts.allow("reward") == Restart(1, 1)
    assert restarts.allow("env") is None


def test_no_restart_at_all() -> None:
    assert Restarts(RestartLimit(max=0), Clock()).allow("env") is None


@pytest.mark.parametrize(
    ("written", "limit", "seconds"),
    [(5, 5, None), ({"max": 3, "within": "10m"}, 3, 600.0), ({"within": "2h"}, 3, 7200.0), ({}, 3, None)],
)
def test_number_and_window_are_read_from_a_file(written: object, limit: int, seconds: float | None) -> None:
    read = RunnerConfig.model_validate({"max_restarts": written}).max_restarts
    assert (read.max, read.seconds) == (limit, seconds)


@given(cost=st.floats(0.001, 30), step=st.floats(0.01, 20), interval=st.floats(1, 60))
def test_snapshots_take_one_percent_at_most(cost: float, step: float, interval: float) -> None:
    clock = Clock()
    schedule = SnapshotSchedule(interval, clock)
    spent, unsaved, longest = 0.0, 0.0, 0.0
    for _ in range(3000):
        clock.now += step
        unsaved += step
        longest = max(longest, unsaved)
        if schedule.due:
            with schedule.saving():
                clock.now += cost
            spent, unsaved = spent + cost, 0.0
    # The first one comes after the interval, whatever it will take.
    assert spent <= 0.01 * clock.now + cost
    assert longest <= max(interval, 100 * cost) + 2 * step


def test_none_is_due_without_an_interval() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(None, clock)
    clock.now = 1e6
    assert not schedule.due


def test_none_is_due_after_the_last_one() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(60.0, clock)
    clock.now = 61.0
    assert schedule.due
    schedule.stop()
    assert not schedule.due


SHARE = {"1": "one", "2": "two", "3": "three"}


def test_items_of_one_death_are_not_suspected() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "`rollout:0` died")
    assert suspects.due() == {}


def test_items_of_two_deaths_are_tried_alone() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "first")
    suspects.died_of({"2": "two", "9": "nine"}, "second")
    assert suspects.due() == {"2": "two"}


def test_item_that_kills_alone_is_set_aside_with_its_deaths() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    suspects.lived("1")
    assert suspects.killed("2", "third") == ["first", "second", "third"]
    assert suspects.set_aside == {"2"}
    assert suspects.due() == {"3": "three"}
    suspects.died_of(SHARE, "fourth")
    assert "2" not in suspects.due()


def test_named_item_is_set_aside_at_the_third_death() -> None:
    suspects: Suspects[str] = Suspects()
    deaths = [suspects.died_of_one("2", "two", reason) for reason in ("first", "second", "third", "fourth")]
    assert deaths == [[], [], ["first", "second", "third"], []]
    assert suspects.set_aside == {"2"}


def test_item_that_was_there_by_chance_is_forgotten() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    for name in SHARE:
        suspects.lived(name)
    suspects.died_of(SHARE, "third")
    assert (suspects.due(), suspects.set_aside) == ({}, frozenset())


class Group:
    def __init__(self, name: str) -> None:
        self.worker_group_name = name
        self.relaunched: list[tuple[int, ...]] = []
        self.broken = False

    def relaunch(self, *ranks: int) -> None:
        if self.broken:
            raise RuntimeFailure("no room")
        self.relaunched.append(ranks)


class Healing(Relaunching):
    def __init__(self, groups: dict[str, Group], record: RunRecord) -> None:
        super().__init__(cast("Any", groups), record)
        self.prepared: list[Dead] = []

    def may_relaunch(self, dead: Dead) -> bool:
        return "actor" not in dead

    def prepare(self, dead: Dead) -> str:
        self.prepared.append(dead)
        return "the rollout"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def healing(tmp_path: Path, events: list[Event]) -> Healing:
    folder = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "embodied")
    record = RunRecord(folder, MetricsWriter(folder.metrics_file), events.append)
    record.restarts = Restarts(RestartLimit(max=2))
    return Healing({"env": Group("EnvGroup"), "rollout": Group("RolloutGroup"), "actor": Group("ActorGroup")}, record)


def groups_of(healing: Healing) -> dict[str, Group]:
    return cast("dict[str, Group]", healing._groups)


def died(*addresses: str) -> WorkerGroupError:
    """The failure of a call, of which the first worker died, and the others wait for one each."""
    first, *others = addresses
    group, _, rank = first.partition(":")
    failures: dict[int, Exception] = {int(rank): WorkerDiedError(first, node="node 0")}
    failures |= {10 + number: WorkerDiedError(other) for number, other in enumerate(others)}
    return WorkerGroupError(group, "interact", failures, 12)


def failing(*errors: Exception) -> Any:
    left = list(errors)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_the_dead_are_started_again_and_work_is_repeated(healing: Healing, events: list[Event]) -> None:
    assert healing.repeat(failing(died("EnvGroup:1", "RolloutGroup:0"))) == "done"
    assert groups_of(healing)["env"].relaunched == [(1,)]
    assert groups_of(healing)["rollout"].relaunched == [(0,)]
    assert healing.prepared == [{"env": (1,), "rollout": (0,)}]
    (event,) = events
    assert isinstance(event, WorkersRelaunched)
    assert (event.step, event.restart, event.max_restarts) == (0, 1, 2)
    assert (event.reason, event.repeated) == ("`EnvGroup:1` on node 0 died", "the rollout")
    assert event.details[-1].startswith("evidence: ")


def test_a_death_tells_its_signal(healing: Healing, events: list[Event]) -> None:
    error = WorkerDiedError("EnvGroup:0", end=ProcessEnd("SIGKILL", None, None))
    assert healing.repeat(failing(WorkerGroupError("EnvGroup", "interact", {0: error}, 1))) == "done"
    assert [event.reason for event in events if isinstance(event, WorkersRelaunched)] == ["`EnvGroup:0` died (SIGKILL)"]


def test_the_limit_of_restarts_counts_relaunches(healing: Healing) -> None:
    third = died("EnvGroup:2")
    with pytest.raises(WorkerGroupError) as caught:
        healing.repeat(failing(died("EnvGroup:0"), died("EnvGroup:1"), third))
    assert caught.value is third
    assert groups_of(healing)["env"].relaunched == [(0,), (1,)]


@pytest.mark.parametrize(
    "error",
    [
        died("ActorGroup:0"),
        died("EnvGroup:0", "trajectories:0"),
        WorkerGroupError("EnvGroup", "interact", {0: ValueError("no joint")}, 1),
        WorkerDiedError("manager"),
        WorkerDiedError("EnvGroup:0", cause="its node left the cluster"),
    ],
    ids=["not allowed", "a channel too", "an exception", "the manager", "a node"],
)
def test_other_failures_are_raised(healing: Healing, events: list[Event], error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        healing.repeat(failing(error))
    assert caught.value is error
    assert events == []
    assert not any(group.relaunched for group in groups_of(healing).values())


def test_a_relaunch_that_fails_raises_the_death(healing: Healing, events: list[Event]) -> None:
    groups_of(healing)["env"].broken = True
    error = died("EnvGroup:0")
    with pytest.raises(WorkerGroupError) as caught:
        healing.repeat(failing(error))
    assert caught.value is error
    assert events == []


def test_deaths_of_a_cause_are_found_too() -> None:
    error = died("RolloutGroup:3")
    error.__cause__ = died("EnvGroup:1")
    assert all_deaths(error).keys() == {"RolloutGroup:3", "EnvGroup:1"}


def test_nobody_is_started_again_alone_without_a_watcher(healing: Healing, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = WorkerDiedError("raylet", node="this machine", cause="it ended with exit code 0")
    monkeypatch.setattr("rlinf_core.runners.run_program.fallen_watcher", lambda: lost)

    with pytest.raises(WorkerGroupError):
        healing.repeat(failing(died("EnvGroup:1")))

    assert groups_of(healing)["env"].relaunched == []


END = ProcessEnd("SIGKILL", None, "Out of memory: Killed process 4711 (python)")


@pytest.fixture
def secret() -> Iterator[str]:
    known_secrets.remember(["tr0ub4dor&3"])
    yield "tr0ub4dor&3"
    known_secrets.forget()


def death(cause: str = "it was killed") -> WorkerGroupError:
    died = WorkerDiedError("EnvGroup:1", node="node 0", cause=cause, end=END)
    error = WorkerGroupError("EnvGroup", "interact", {1: died, 0: ChannelClosed("actions", "closed")}, 2)
    error.places = {1: "node 0 (127.0.0.1), pid 4711"}
    return error


def test_errors_of_all_processes_are_kept_whole(tmp_path: Path) -> None:
    folder = keep_evidence(tmp_path, death(), 7, {"EnvGroup": "env"})
    (bundle,), faults = read_bundles(tmp_path)
    assert (bundle.path, faults, bundle.content.step) == (folder, [], 7)
    first, second = bundle.content.failures
    assert (first.name, first.component, first.rank, first.died) == ("EnvGroup:1", "env", 1, True)
    assert (first.signal, first.out_of_memory) == ("SIGKILL", END.out_of_memory)
    assert first.place == "node 0 (127.0.0.1), pid 4711"
    assert "WorkerDiedError" in first.traceback
    assert (second.consequence, second.died, second.bases[0]) == (True, False, "ChannelClosed")
    assert evidence_line(folder) == [f"evidence: {EVIDENCE}/{bundle.path.name}"]
    assert (bundle.path / "versions.json").is_file()


def test_error_that_is_raised_on_is_kept_once(tmp_path: Path) -> None:
    error = death()
    assert keep_evidence(tmp_path, error, 1) == keep_evidence(tmp_path, error, 2)
    assert len(bundle_folders(tmp_path)) == 1


def test_failure_without_words_is_named_by_its_type() -> None:
    assert reason_of(RLinfError("")) == "the driver failed: rlinf_core.errors.RLinfError"
    assert reason_of(ValueError()) == "the driver failed: ValueError"


def test_half_of_a_character_does_not_hide_the_evidence(tmp_path: Path) -> None:
    keep_evidence(tmp_path, ValueError("no file \udcff"), 1)
    assert read_bundles(tmp_path)[0][0].content.failures[0].text == "no file \\udcff"


def test_first_bundles_and_the_newest_stay(tmp_path: Path) -> None:
    kept = [keep_evidence(tmp_path, death(), step) for step in range(MOST_BUNDLES + 3)]
    assert bundle_folders(tmp_path) == sorted(path for path in (*kept[:2], *kept[5:]) if path is not None)


def test_known_secrets_are_masked_everywhere(tmp_path: Path, secret: str) -> None:
    (tmp_path / "logs" / "env").mkdir(parents=True)
    (tmp_path / "logs" / "env" / "rank_1.log").write_text(f"connect with {secret}\npassword: hunter2\n")
    folder = keep_evidence(tmp_path, death(f"it said {secret}"), 1, {"EnvGroup": "env"})
    assert folder is not None
    texts = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert not [name for name, text in texts.items() if secret in text or "hunter2" in text]
    assert json.loads(texts[FAILURE])["failures"][0]["signal"] == "SIGKILL"


def test_bundle_is_bounded_and_names_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(scene: evidence.FailureScene) -> Iterator[tuple[str, str]]:
        yield from ((f"part{number}.txt", "x" * (3 << 20)) for number in range(40))

    def broken(scene: evidence.FailureScene) -> Iterator[tuple[str, str]]:
        yield "begun.txt", "1"
        raise ValueError("no such folder")

    monkeypatch.setattr(evidence, "PARTS", (broken, large))
    folder = keep_evidence(tmp_path, death(), 1)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 20 << 20
    missing = read_bundles(tmp_path)[0][0].content.missing
    assert missing[0] == "broken: ValueError: no such folder"
    assert missing[-1] == "part39.txt: the bundle is full"


def test_folder_that_cannot_be_written_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / EVIDENCE).write_text("a file")
    assert keep_evidence(tmp_path, death(), 1) is None
    assert "no evidence of the failure was kept" in caplog.text


def test_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / EVIDENCE).symlink_to(elsewhere)
    assert keep_evidence(run, death(), 1) is None
    assert not list(elsewhere.iterdir())


def test_partial_bundle_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(evidence.durable, "rename", full)
    assert keep_evidence(tmp_path, death(), 1) is None
    assert list((tmp_path / EVIDENCE).iterdir()) == []
