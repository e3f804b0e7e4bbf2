"""Links in a run folder that somebody else made: whatever is written there replaces or refuses them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.language.loop.arrivals import write_samples
from rlinf_cli.console.console import write_whole
from rlinf_cli.live import driver_log
from rlinf_cli.report.curves import draw_curve
from rlinf_cli.runs.documents import Provenance, write_provenance
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RLinfError
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage import durable, run_events
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, read_state
from rlinf_core.runners.trace import TraceWriter
from tests.unit.cli.report_runs import full_run
from tests.unit.cli.typed import Cli, text_file


def log_a_line(run: RunFolder) -> None:
    with driver_log.driver_log(run.log_file("driver", 0), on_screen=False) as log:
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
    "logs/output/rank_0.log": lambda run: driver_log._redirect(run.log_file("output", 0)),  # pyright: ignore[reportPrivateUsage]
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
