"""Bundles of evidence: whole errors, limits in size and number, masked secrets; a failure of it fails nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.errors import ChannelClosed, ProcessEnd, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.process import known_secrets
from rlinf_core.runners import evidence
from rlinf_core.runners.evidence import evidence_line, keep_evidence
from rlinf_core.runners.storage.evidence import FAILURE, FOLDER, MOST_BUNDLES, bundle_folders, read_bundles

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
    assert evidence_line(folder) == [f"evidence: {FOLDER}/{bundle.path.name}"]
    assert (bundle.path / "versions.json").is_file()


def test_error_that_is_raised_on_is_kept_once(tmp_path: Path) -> None:
    error = death()
    assert keep_evidence(tmp_path, error, 1) == keep_evidence(tmp_path, error, 2)
    assert len(bundle_folders(tmp_path)) == 1


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
    (tmp_path / FOLDER).write_text("a file")
    assert keep_evidence(tmp_path, death(), 1) is None
    assert "no evidence of the failure was kept" in caplog.text


def test_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / FOLDER).symlink_to(elsewhere)
    assert keep_evidence(run, death(), 1) is None
    assert not list(elsewhere.iterdir())


def test_partial_bundle_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(evidence.durable, "rename", full)
    assert keep_evidence(tmp_path, death(), 1) is None
    assert list((tmp_path / FOLDER).iterdir()) == []
