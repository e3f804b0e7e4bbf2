"""Checkpoints: complete or not there, whenever the writer dies."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.errors import CheckpointError
from rlinf_core.runners.storage.checkpoint import Checkpoint, Manifest, ManifestFile, load_manifest, open_checkpoint
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@contextmanager
def killed_before(number: int) -> Iterator[list[str]]:
    """Everything that changes the disk works `number` times, then nothing does. Yields what was done."""
    done: list[str] = []
    patch = pytest.MonkeyPatch()

    def cut(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= number:
                raise Killed
            result = real(*args, **kwargs)
            done.append(f"{name} to {Path(args[1]).name}" if name == "rename" else name)
            return result

        return operation

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        patch.setattr(os, name, cut(name, getattr(os, name)))

    def remove_tree(folder: Path, **_: Any) -> None:
        # One by one, so that the process can die in the middle of it.
        for parent, folders, files in os.walk(folder, topdown=False):
            for file in files:
                os.unlink(Path(parent) / file)
            for file in folders:
                os.rmdir(Path(parent) / file)
        os.rmdir(folder)

    patch.setattr(shutil, "rmtree", remove_tree)
    try:
        yield done
    finally:
        patch.undo()


def save(store: CheckpointStore, step: int, content: str = "", *, snapshot: bool = False) -> Path:
    work = store.begin(step)
    (work / "actor").mkdir()
    (work / "actor" / "weights").write_text(content or f"weights of step {step}")
    (work / "rank_0").write_text("random state")
    return store.commit(step, Manifest(step=step, facts={"actor.model.hidden_dim": 128}, snapshot=snapshot))


def steps(store: CheckpointStore) -> list[int]:
    return [item.step for item in store.complete()]


def read(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    return (checkpoint.path / "actor" / "weights").read_text()


def test_what_is_committed_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    assert store.complete() == []
    path = save(store, 10)
    assert path == tmp_path / "checkpoints" / "global_step_10"
    save(store, 9)
    latest = store.latest()
    assert latest is not None
    assert latest.path == path
    assert steps(store) == [9, 10]
    assert latest.manifest.files == {"actor/weights": len("weights of step 10"), "rank_0": len("random state")}
    assert latest.manifest.versions["rlinf"]
    assert (store.folder / "latest").read_text() == "global_step_9\n"
    assert sorted(path.name for path in store.folder.iterdir()) == ["global_step_10", "global_step_9", "latest"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 100):
        save(store, step)
    assert steps(store) == [10, 100]
    assert not (tmp_path / "global_step_5").exists()


def test_snapshot_lasts_until_the_next_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, snapshot in ((5, False), (7, True), (8, True), (10, False), (12, True), (11, True)):
        save(store, step, snapshot=snapshot)
    assert steps(store) == [5, 10, 11]
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.manifest.snapshot) == (11, True)
    save(store, 15)
    assert steps(store) == [10, 15]


def test_a_step_that_is_done_again_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5, "first")
    save(store, 5, "second")
    assert read(store.latest()) == "second"
    assert steps(store) == [5]


# How many are kept, whether the last step is done again, and how many were there before; all others by night.
_BY_DAY = {(-1, True, 2), (1, False, 0), (1, False, 1), (1, True, 1), (2, False, 2), (2, True, 3)}


@pytest.mark.parametrize(
    ("keep", "again", "before"),
    [
        pytest.param(*case, marks=() if case in _BY_DAY else pytest.mark.nightly)
        for case in product((-1, 1, 2), (False, True), range(4))
    ],
)
def test_killed_at_any_moment(tmp_path_factory: pytest.TempPathFactory, keep: int, again: bool, before: int) -> None:
    """At every cut the newest complete checkpoint is the old one or the new one, and whole; and the run can go on."""
    step = before if again and before else before + 1
    number = 0
    while True:
        store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints", keep)
        for old in range(1, before + 1):
            save(store, old)
        with killed_before(number) as done:
            try:
                save(store, step, "new")
                finished = True
            except Killed:
                finished = False
        survivors = CheckpointStore(store.folder, keep)
        survivors.recover()
        latest = survivors.latest()
        contents = {item.step: read(item) for item in survivors.complete()}
        allowed = {old: {f"weights of step {old}"} for old in range(1, before + 1)}
        allowed.setdefault(step, set()).add("new")
        assert all(contents[content] in allowed[content] for content in contents)
        if before:
            assert latest is not None
            assert latest.step in (before, step)
        if f"rename to global_step_{step}" in done:
            assert read(latest) == "new"
        save(survivors, step + 1)
        assert read(survivors.latest()) == f"weights of step {step + 1}"
        left = {path.name for path in survivors.folder.iterdir()}
        assert left == {"latest", *(f"global_step_{step}" for step in steps(survivors))}
        shutil.rmtree(store.folder)
        if finished:
            return
        number += 1
        assert number < 200


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(old: Any, new: Any) -> None:
        if str(new).endswith("global_step_3"):
            written = {str(path) for path in Path(old).rglob("*")}
            # The manifest was synced under the name that it had before.
            assert {path for path in written if not path.endswith("manifest.json")} <= synced
            assert any("manifest.json" in path for path in synced)
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(CheckpointStore(tmp_path), 3)
    assert str(tmp_path) in synced


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: (path / "rank_0").unlink(), "`rank_0` is missing"),
        (lambda path: (path / "rank_0").write_text("ran"), "`rank_0` has 3 bytes, 12 were written"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{"), "is not JSON"),
        (lambda path: (path / "manifest.json").write_text('{"schema": "rlinf.checkpoint/9"}'), "rlinf.checkpoint/1"),
        (lambda path: shutil.rmtree(path), "there is no such folder"),
    ],
)
def test_a_damaged_one_is_not_taken(tmp_path: Path, damage: Callable[[Path], None], why: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2)
    damage(path)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert why in str(raised.value)
    assert str(path) in str(raised.value)
    assert steps(store) == [1]


def test_fields_of_a_later_version_do_not_matter(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 2)
    data = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**data, "mood": "good"}))
    assert load_manifest(path).step == 2


def test_metrics_without_a_number_are_null(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    path = store.commit(1, Manifest(step=1, metrics={"a": float("nan"), "b": 0.5}))
    assert json.loads((path / "manifest.json").read_text(), parse_constant=pytest.fail)["metrics"] == {
        "a": None,
        "b": 0.5,
    }


def test_another_model_is_refused_with_every_difference() -> None:
    facts = {"actor.model.hidden_dim": 128, "actor.model.model_type": "mlp_policy", "env.train.task": "pick"}
    checkpoint = Checkpoint(7, Path("global_step_7"), Manifest(step=7, facts=facts))
    checkpoint.check({**facts, "actor.model.is_lora": True})
    with pytest.raises(CheckpointError) as raised:
        checkpoint.check({**facts, "actor.model.hidden_dim": 64, "env.train.task": None})
    assert (
        "`actor.model.hidden_dim` is `128` there and `64` now; `env.train.task` is `pick` there and not set now"
        in str(raised.value)
    )


def test_a_full_disk_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.begin(2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.commit(2, Manifest(step=2))
    assert steps(store) == [1]


def test_run_that_was_renamed_saves_nothing_in_its_old_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        CheckpointStore(tmp_path / "renamed" / "checkpoints").begin(1)
    assert not list(tmp_path.iterdir())


def test_commit_without_begin(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not begun"):
        CheckpointStore(tmp_path).commit(3, Manifest(step=3))


def rewrite(path: Path, **fields: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 4, "weights")
    names = [name for name in open_checkpoint(path).manifest.files if (path / name).stat().st_size]
    assert names
    for name in names:
        open_checkpoint(path).verify()
        whole = (path / name).read_bytes()
        flip(path / name)
        with pytest.raises(CheckpointError, match="damaged") as caught:
            open_checkpoint(path).verify()
        assert f"`{name}` was changed" in str(caught.value.why)
        (path / name).write_bytes(whole)


def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        save(store, step, "weights")
    newest = tmp_path / "global_step_4"
    name = max(open_checkpoint(newest).manifest.files, key=lambda item: (newest / item).stat().st_size)
    flip(newest / name)
    sound = store.latest_sound()
    assert sound is not None
    assert sound.step == 2
    assert "global_step_4" in caplog.text
    assert name in caplog.text


def test_a_manifest_without_digests_has_its_sizes_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(CheckpointStore(tmp_path), 4, "weights")
    file = path / "manifest.json"
    fields = json.loads(file.read_text())
    del fields["digests"]
    file.write_text(json.dumps(fields))
    open_checkpoint(path).verify()
    (message,) = caplog.messages
    assert message.startswith(f"{path} has no digests")
    name = next(iter(fields["files"]))
    (path / name).write_bytes((path / name).read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="not complete"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "4"},
        {"step": None},
        {"step": True},
        {"time": "now"},
        {"weight_version": []},
        {"files": []},
        {"files": {"a": "1"}},
        {"files": {"../outside": 1}},
        {"files": {"/etc/passwd": 1}},
        {"digests": 3},
        {"digests": {"a": 1}},
        {"metrics": {"loss": "x"}},
        {"facts": {"a": []}},
        {"world_sizes": {"actor": "1"}},
        {"versions": None},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_fields_of_another_type_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = save(CheckpointStore(tmp_path), 4, "weights")
    rewrite(path, **fields)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        open_checkpoint(path)
    assert CheckpointStore(tmp_path).latest() is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([-1, 4, 2**63, "..", "/etc/passwd", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "../b"]), inner, max_size=3),
    max_leaves=6,
)


FIELDS = st.dictionaries(st.sampled_from([*ManifestFile.model_fields, "schema", "more"]), VALUES, max_size=4)


def test_no_value_of_any_field_breaks_the_reader(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 4)
    whole = (path / "manifest.json").read_text()
    outcomes: list[int | str | None] = []

    @given(fields=FIELDS)
    def read_with(fields: dict[str, Any]) -> None:
        (path / "manifest.json").write_text(json.dumps(json.loads(whole) | fields))
        try:
            outcomes.append(open_checkpoint(path).step)
        except CheckpointError as error:
            outcomes.append(error.why)

    read_with()
    assert all(isinstance(outcome, int) or outcome for outcome in outcomes)
    assert {type(outcome) for outcome in outcomes} == {int, str}


def test_a_file_without_a_digest_is_refused_among_others(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 4, "weights")
    digests = dict(open_checkpoint(path).manifest.digests)
    name = next(iter(digests))
    del digests[name]
    rewrite(path, digests={"other": "0", **digests})
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path).verify()


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    old = save(store, 1, "old")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source.name.startswith(".writing-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(store, 1, "new")
    assert (old / "actor" / "weights").read_text() == "old"


def test_of_a_link_to_a_folder_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".replaced-global_step_1").symlink_to(tmp_path / "theirs")
    (tmp_path / "checkpoints" / "global_step_1").mkdir()
    CheckpointStore(tmp_path / "checkpoints").recover()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]
    assert (tmp_path / "theirs").is_dir()
