"""Run folders that somebody else made, copied or broke: no command signals, deletes or fails by what they say."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.language.loop.group_accounts import write_samples
from rlinf_cli.console import write_whole
from rlinf_cli.report.curves import draw_curve
from rlinf_cli.run import driver
from rlinf_cli.runs.documents import Provenance, write_provenance
from rlinf_cli.runs.logs import driver_log
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RLinfError
from rlinf_core.node import process_life
from rlinf_core.node.process_life import own_identity
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage import durable, run_events
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import MARK, STATE, RunState, read_state
from rlinf_core.runners.trace import TraceWriter
from tests.unit.cli.report_runs import full_run
from tests.unit.cli.typed import Cli, text_file

COMMANDS = (["runs"], ["stop"], ["logs"], ["samples"], ["runs", "prune", "--keep", "0", "--status", "failed"])


def created(experiment: str = "good", recipe: str = "embodied", save_path: Path | None = None) -> RunFolder:
    config = RunnerConfig.model_validate({"logger": {"experiment_name": experiment}})
    return RunFolder.create(config, recipe, str(save_path) if save_path else None)


def put(path: Path, content: str) -> None:
    """Put a pipe, a device, a folder, a link to nothing or a text in the place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match content:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "nowhere":
            path.symlink_to("nowhere")
        case _:
            path.write_text(content, encoding="latin-1")


def forged(name: str, **fields: object) -> Path:
    """A run folder that says what `fields` say, and else what a run of this process would."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    state = {"schema": "rlinf.run/1", "recipe": "a", "experiment": "b", "status": "running", **own_identity()._asdict()}
    (folder / STATE).write_text(json.dumps(state | fields))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Every signal and deletion, which are noted instead of done."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: calls.append(("kill", *arguments)))
    monkeypatch.setattr(os, "killpg", lambda *arguments: calls.append(("killpg", *arguments)))
    monkeypatch.setattr(process_life, "send", lambda *arguments: calls.append(("send", *arguments)))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: calls.append(("rmtree", str(path))))
    return calls


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that drives no run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class TestStop:
    @pytest.mark.parametrize(
        "fields",
        [
            {"pid": -1, "start": None, "boot": None},
            {"pid": -1, "start": ""},
            {"pid": 0, "start": ""},
            {"pid": 0, "start": "0:1"},
            {"pid": 1, "start": "1:1"},
            {"pid": 1, "start": process_life.identity(1)},
            {"start": ""},
            {"start": "", "boot": "", "pid_namespace": 0},
            {"boot": "", "pid_namespace": 0},
            {"pid": os.getppid(), "start": process_life.identity(os.getppid())},
        ],
    )
    @pytest.mark.parametrize("force", [[], ["--force"]])
    def test_signals_nothing_on_what_a_file_says(
        self, cli: Cli, here: Path, done: list[Any], fields: dict[str, object], force: list[str]
    ) -> None:
        forged("x", **fields)
        for run in ([], ["x"]):
            assert "Traceback" not in cli("stop", *run, *force).err
        assert done == []

    def test_a_process_that_is_named_and_drives_no_run_lives(
        self, cli: Cli, here: Path, stranger: subprocess.Popen[bytes]
    ) -> None:
        forged("x", pid=stranger.pid, start=process_life.identity(stranger.pid))
        assert "no signal was sent: the process may not be" in cli.fails(1, "stop", "x", "--force")
        assert stranger.poll() is None

    def test_a_copy_does_not_stop_the_run_that_it_is_of(self, cli: Cli, here: Path, done: list[Any]) -> None:
        original = created()
        shutil.copytree(original.path, here / "backup" / original.path.name)
        ended = cli("stop", "--runs-dir", here / "backup")
        assert (ended.code, done) == (1, [])
        assert "does not have the folder open" in ended.err

    def test_a_live_run_is_found_beside_broken_ones(self, cli: Cli, here: Path, done: list[Any]) -> None:
        run = created()
        forged("far", host="farm-7", boot="0")
        forged("worse", pid=-1)
        monkey = cli("stop", "--timeout", "0")
        assert [call[0] for call in done] == ["send"]
        assert done[0][2] == signal.SIGTERM
        assert "runs/worse is skipped: `run.json` has an invalid value: `pid` is `-1`" in monkey.err
        assert run.state.alive


class TestOneBadFolder:
    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ('{"schema": "rlinf.run/1", "recipe": 5, "experiment": "b"}', "`recipe` is `5`"),
            ('{"schema": "rlinf.run/1", "recipe": "a", "experiment": "b", "status": "weird"}', '`status` is `"weird"`'),
            ('{"schema": "rlinf.run/1", "recipe": "a", "experiment": "b", "created": null}', "`created` is `null`"),
            ('{"schema": "rlinf.run/1", "recipe": "a", "experiment": "b", "checkpoints": null}', "`checkpoints` is"),
            ('{"schema": "rlinf.run/1", "recipe": "a", "experiment": "b", "earlier": "x"}', '`earlier` is `"x"`'),
            ('{"schema": "rlinf.run/2", "recipe": "a", "experiment": "b"}', '`schema` is `"rlinf.run/2"`'),
            ("[" * 200_000, "is nested more than 100 levels deep"),
            ("{", "is not JSON"),
            ("", "is not JSON"),
            ("[]", "is not a JSON object"),
            ("\xff\xfe", "is UTF-16 text, not UTF-8"),
            ("x" * (2 << 20), "is larger than 1 MiB"),
            ("pipe", "is a pipe, not a regular file"),
            ("device", "is a device, not a regular file"),
            ("folder", "is a folder, not a regular file"),
            ("nowhere", "cannot be read"),
        ],
    )
    def test_hides_no_other(self, cli: Cli, here: Path, content: str, why: str) -> None:
        created().end("finished")
        bad = here / "runs" / "bad"
        put(bad / STATE, content)
        ended = cli("runs")
        assert (ended.code, len(ended.out.splitlines())) == (0, 2)
        if content != "nowhere":
            assert "runs/bad is skipped: `run.json` " in ended.err
            assert why in ended.err
            (output,) = json.loads(cli("runs", "--json").out)["unreadable"]
            assert why in output["reason"]
        for command in COMMANDS:
            for run in ([], ["bad"]) if command != ["runs"] else ([],):
                assert "this is a bug" not in cli(*command, *run).err
        assert cli("runs", "prune", "bad", "--delete").code == 1
        assert bad.exists()


class TestPrune:
    def test_a_run_of_another_container_is_not_failed(self, cli: Cli, here: Path) -> None:
        run = created()
        # As a container with this host's name sees it: the pid is nobody's, or somebody else's.
        run.update(pid_namespace=run.state.pid_namespace + 1, start=f"{run.state.pid}:1")
        assert cli("runs").out.splitlines()[1].split()[2] == "unknown"
        assert cli("runs", "prune", "--status", "failed", "--delete").code == 0
        for arguments in (["--keep", "0", "--older-than", "0m"], [run.path.name]):
            ended = cli("runs", "prune", *arguments, "--delete")
            assert "may be active and is kept" in ended.err
        assert run.path.is_dir()

    def test_a_copy_leaves_the_checkpoints_of_the_original(self, cli: Cli, here: Path) -> None:
        original = created(save_path=here / "weights")
        original.checkpoints.begin(4)
        original.checkpoints.commit(4, Manifest(step=4))
        original.end("finished")
        shutil.copytree(here / "runs", here / "backup")
        listed = cli("runs", "prune", "--status", "finished", "--runs-dir", "backup")
        kept = here / "weights" / original.path.name
        assert f"checkpoints in {kept} are kept:" in listed.out
        assert "it is marked as owned by the run in" in listed.out
        assert cli("runs", "prune", "--status", "finished", "--delete", "--runs-dir", "backup").code == 0
        assert not list((here / "backup").iterdir())
        assert original.checkpoints.latest() is not None
        # The original's own are deleted with it, and the listing says so before.
        assert f"{kept}, " in cli("runs", "prune", "--status", "finished").out
        assert cli("runs", "prune", "--status", "finished", "--delete").code == 0
        assert (original.path.exists(), kept.exists()) == (False, False)

    def test_copy_in_the_place_of_the_original_skips_them_too(self, cli: Cli, here: Path) -> None:
        original = created(save_path=here / "weights")
        original.end("finished")
        shutil.copytree(here / "runs", here / "copy")
        (here / "runs").rename(here / "moved")
        (here / "copy").rename(here / "runs")
        assert cli("runs", "prune", "--status", "finished", "--delete").code == 0
        assert (here / "weights" / original.path.name).is_dir()

    @pytest.mark.parametrize("mark", [None, "{}", "[" * 200_000, "pipe", "link", "of another run"])
    def test_a_folder_that_does_not_say_whose_it_is_stays(self, cli: Cli, here: Path, mark: str | None) -> None:
        other = created("other", save_path=here / "weights")
        run = created()
        precious = here / "precious" / run.path.name
        precious.mkdir(parents=True)
        if mark == "pipe":
            os.mkfifo(precious / MARK)
        elif mark == "link":
            (precious / MARK).symlink_to(here / "weights" / other.path.name / MARK)
        elif mark == "of another run":
            shutil.copy(here / "weights" / other.path.name / MARK, precious / MARK)
        elif mark is not None:
            (precious / MARK).write_text(mark)
        run.update(checkpoints=str(precious))
        run.end("finished")
        ended = cli("runs", "prune", "--status", "finished", "--delete")
        assert (ended.code, precious.is_dir(), run.path.exists()) == (0, True, False)

    @pytest.mark.parametrize("checkpoints", ["..", ".", "../other", "/", "checkpoints/../../other"])
    def test_paths_that_lead_out_of_the_folder_delete_nothing(self, cli: Cli, here: Path, checkpoints: str) -> None:
        (here / "runs" / "other").mkdir(parents=True)
        (here / "runs" / "other" / "data").write_text("mine")
        run = created()
        run.update(checkpoints=checkpoints)
        run.end("finished")
        assert cli("runs", "prune", run.path.name, "--delete").code == 0
        assert (here / "runs" / "other" / "data").exists()

    def test_a_run_that_is_reached_by_a_link_stays(self, cli: Cli, here: Path) -> None:
        run = created()
        run.end("finished")
        (here / "shared").mkdir()
        run.path.rename(here / "shared" / "run")
        (here / "runs" / "link").symlink_to(here / "shared" / "run")
        assert "it is a link" in cli.fails(1, "runs", "prune", "--status", "finished", "--delete")
        assert (here / "shared" / "run" / STATE).is_file()


def test_two_runs_of_one_name_do_not_share_their_checkpoints(here: Path) -> None:
    first = created(save_path=here / "weights")
    config = RunnerConfig.model_validate({"logger": {"experiment_name": "good", "log_path": str(here / "b")}})
    second = RunFolder.create(config, "embodied", str(here / "weights"))
    assert first.checkpoints.folder != second.checkpoints.folder


def test_a_copy_that_is_resumed_leaves_the_original_alone(here: Path) -> None:
    original = created(save_path=here / "weights")
    original.checkpoints.begin(4)
    original.checkpoints.commit(4, Manifest(step=4))
    original.end("finished")
    copy = here / "backup" / original.path.name
    shutil.copytree(original.path, copy)
    config = RunnerConfig.model_validate({"resume_dir": str(copy), "logger": {"log_path": str(here / "backup")}})
    resumed = RunFolder.create(config, "embodied")
    assert resumed.path not in (copy, original.path)
    assert resumed.checkpoints.folder != original.checkpoints.folder


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([-1, 0, 1, 2, os.getpid(), f"{os.getpid()}:1", "", "..", "/", "running", "failed", "finished"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.sampled_from([*RunState.model_fields, "schema"]), VALUES, max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
def test_no_value_of_any_field_signals_deletes_or_breaks(
    cli: Cli, here: Path, done: list[tuple[object, ...]], fields: dict[str, object]
) -> None:
    for entry in (here / "runs").glob("*/*"):
        entry.unlink()
        entry.parent.rmdir()
    forged("x", **fields)
    done.clear()
    for command in (["stop"], ["stop", "x", "--force"], ["runs"], ["logs"], ["runs", "prune", "x", "--delete"]):
        ended = cli(*command)
        assert ended.code in (0, 1, 2)
        assert "this is a bug" not in ended.err
        assert "Traceback" not in ended.err
    # Its own folder may be deleted: that was asked for by name.
    assert not [call for call in done if call[0] != "rmtree" or not Path(str(call[1])).is_relative_to(here / "runs/x")]


FILES = (
    *("metrics.jsonl", "events.jsonl", "origins.json", "placement.json", "environment.json"),
    *("memory.json", "profile.json", "trace.json", "config.yaml", "samples/step_4.jsonl"),
    *("logs/actor/rank_0.log", "videos/small.mp4", "first_contact.json", "evidence/20260314-101502/failure.json"),
)


CONTENTS = ("pipe", "device", "folder", "[" * 5_000 + "\n", "5\n", '{"step": "x"}\n', "\xff")


def check_commands_over(cli: Cli, run: Path, other: Path) -> None:
    """Give a run to every command that reads run folders."""
    commands: list[list[object]] = [["runs"], ["logs", run], ["samples", run], ["report", run], ["compare", run, other]]
    commands += [["why", run], ["why", run, "--bundle", "bundle.tar.gz"]]
    for command in commands:
        ended = cli(*command)
        assert "this is a bug" not in ended.err
        assert ended.code == 0 or (ended.code == 1 and command[0] != "runs")


@pytest.mark.parametrize("content", CONTENTS)
def test_no_files_of_a_run_block_or_break_a_command(cli: Cli, here: Path, content: str) -> None:
    run, other = full_run("runs"), full_run("runs")
    for name in FILES[1:]:
        put(run.path / name, content)
    check_commands_over(cli, run.path, other.path)
    put(run.path / FILES[0], content)
    check_commands_over(cli, run.path, other.path)


@pytest.mark.nightly
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_no_single_file_blocks_or_breaks_a_command(cli: Cli, here: Path, name: str, content: str) -> None:
    run, other = full_run("runs"), full_run("runs")
    put(run.path / name, content)
    check_commands_over(cli, run.path, other.path)


def log_a_line(run: RunFolder) -> None:
    with driver_log(run.log_file("driver", 0)) as log:
        log.warning("x")


def write_metrics(run: RunFolder) -> None:
    with MetricsWriter(run.metrics_file) as writer:
        writer.log(99, {"a": 1.0})


WRITERS: dict[str, Callable[[RunFolder], object]] = {
    "run.json": lambda run: run.update(step=5),
    "config.yaml": lambda run: run.write_config_text("a: 2\n"),
    "metrics.jsonl": write_metrics,
    "events.jsonl": lambda run: run_events.append_event(run.path, run_events.STARTED, 0, "x"),
    "trace.json": lambda run: TraceWriter(run.trace_file).close(),
    "environment.json": lambda run: write_provenance(run.path, Provenance()),
    "curve.png": lambda run: draw_curve(run.metrics_file, run.path, "x"),
    "curve.svg": lambda run: draw_curve(run.metrics_file, run.path, "x"),
    "samples/step_4.jsonl": lambda run: write_samples(run.path, 4, []),
    "samples": lambda run: write_samples(run.path, 4, []),
    "logs/driver/rank_0.log": log_a_line,
    "logs/driver": log_a_line,
    "logs": log_a_line,
    "logs/output/rank_0.log": lambda run: driver._redirect(run.log_file("output", 0)),  # pyright: ignore[reportPrivateUsage]
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link(name: str, tmp_path: Path) -> None:
    run = full_run(str(tmp_path / "runs"))
    is_folder = (run.path / name).is_dir()
    precious = tmp_path / ("precious" if is_folder else "precious.txt")
    if is_folder:
        precious.mkdir()
    else:
        precious.write_bytes((run.path / name).read_bytes() if (run.path / name).exists() else b"mine")
    before = None if is_folder else precious.read_bytes()
    link = run.path / name
    if link.is_dir() or link.exists():
        link.rename(tmp_path / "away")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious)
    # A link in the way of a file that is added to is refused.
    with suppress(OSError, RLinfError):
        WRITERS[name](run)
    assert list(precious.iterdir()) == [] if is_folder else precious.read_bytes() == before


@pytest.mark.parametrize("arguments", [[], ["-o", "page.html"]])
def test_a_report_replaces_the_link_itself(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = full_run("runs")
    precious = text_file(tmp_path / "bashrc", "mine")
    page = Path(arguments[1]) if arguments else run.path / "report.html"
    page.symlink_to(precious)
    assert cli("report", run.path, *arguments).code == 0
    assert precious.read_text() == "mine"
    assert not page.is_symlink()
    assert "<html" in page.read_text()


def test_a_planted_part_is_not_written_to(tmp_path: Path) -> None:
    precious = text_file(tmp_path / "precious", "mine")
    (tmp_path / f".file.{os.getpid()}.part").symlink_to(precious)
    durable.write_whole(tmp_path / "file", "x")
    assert precious.read_text() == "mine"


def test_standard_output_is_written_to(capfd: pytest.CaptureFixture[str]) -> None:
    write_whole(Path("/dev/stdout"), "text")
    assert Path("/dev/stdout").is_symlink()


class TestAFullDisk:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
        run = RunFolder.create(RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path)}}), "embodied")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(durable.os, "fsync", full)
        return run

    def test_the_end_is_written_all_the_same(self, run: RunFolder) -> None:
        run.end("failed", "no space")
        assert (read_state(run.path).status, read_state(run.path).reason) == ("failed", "no space")
        assert json.loads((run.path / STATE).read_text())["status"] == "failed"

    def test_nothing_half_written_stays(self, run: RunFolder) -> None:
        with pytest.raises(OSError, match="No space left"):
            durable.write_whole(run.path / "file", "x")
        run.update(step=4)
        assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []
