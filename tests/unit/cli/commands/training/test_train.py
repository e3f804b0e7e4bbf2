"""`rlinf train` with a recipe that starts nothing: what is said, where, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rlinf_cli.report import curves
from rlinf_cli.runs.documents import read_provenance
from rlinf_core.errors import RunError
from rlinf_core.process.proc import identity
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_events import story_with_faults
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.typed import Cli

RLINF = Path(sys.executable).with_name("rlinf")


@pytest.fixture(autouse=True)
def folder(fake_recipe: Path) -> Path:
    return fake_recipe


def last_run() -> RunFolder:
    result = RunFolder.latest("runs")
    assert result is not None
    return result


def start(*arguments: str) -> subprocess.Popen[str]:
    """Return a run in a process of its own, as soon as its first step is done."""
    process = subprocess.Popen(
        [RLINF, "train", "recipe=fake", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1/"):
            return process
    raise AssertionError("it ended before its first step")


def broken_disk_for(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds these words finds a disk that takes nothing. On a full one the end finds room: `write_short`."""
    kept = durable.write_whole

    def write_whole(path: Path, text: str, **options: Any) -> None:
        if words in text:
            raise OSError(5, "Input/output error")
        kept(path, text, **options)

    monkeypatch.setattr(durable, "write_whole", write_whole)


class TestARun:
    def test_the_summary_is_the_result_and_the_rest_is_not(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(curves, "draw_curve", lambda metrics, folder, title: (folder / "curve.png", None))
        ended = cli("train", "recipe=fake")
        assert ended.code == 0
        lines = ended.out.splitlines()
        run = last_run()
        assert lines[0] == "finished"
        assert lines[1].startswith("  steps       12, in 0:00 (")
        assert lines[2:] == [
            "  evaluation  success 0.75, return 9 (step 10)",
            "  training    success 0.9, return 12.5, length 40",
            f"  checkpoint  runs/{run.path.name}/checkpoints/global_step_10",
            f"  curve       runs/{run.path.name}/curve.png",
            f"  run folder  runs/{run.path.name}",
        ]
        output = ended.err.splitlines()
        assert any(line.startswith("component  processes  group  nodes  units   per process") for line in output)
        assert f"run folder: runs/{run.path.name}" in output
        assert "waiting for rollout: 2 processes, at most 30 s" in output
        assert "a worker prints" in output
        assert "warning: something is odd" in output
        assert "evaluated at step 10: success 0.75, return 9" in output
        assert "saved global_step_10" in output
        assert "\x1b" not in ended.out + ended.err

    @pytest.mark.parametrize(("fail", "code"), [("", 0), ("bug", 1)])
    def test_curve_is_drawn_however_the_run_ends(self, cli: Cli, fail: str, code: int) -> None:
        pytest.importorskip("vl_convert")
        ended = cli("train", "recipe=fake", f"fake.fail='{fail}'", "fake.metrics=true")
        assert ended.code == code, ended.err
        assert {path.suffix for path in last_run().path.glob("curve.*")} == {".png", ".svg"}

    def test_curve_that_cannot_be_drawn_hides_no_failure(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RunError("the learning curve cannot be drawn")

        monkeypatch.setattr(curves, "draw_curve", fail)
        err = cli.fails(1, "train", "recipe=fake", "fake.fail=bug")
        assert "warning: the learning curve cannot be drawn" in err
        assert "surprise" in err

    def test_the_summary_names_the_report(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        states: list[str] = []

        def write(folder: Path, *_: Any) -> Path:
            # The verdict comes first.
            states.append(RunFolder.open(folder).state.status)
            return folder / "report.html"

        monkeypatch.setattr(curves, "write_report_at_end", write)
        ended = cli("train", "recipe=fake")
        run = last_run()
        assert f"  report      runs/{run.path.name}/report.html" in ended.out.splitlines()
        assert json.loads(cli.printed(1, "train", "recipe=fake", "fake.fail=worker", "--json"))["report"] == str(
            last_run().path / "report.html"
        )
        assert states == ["finished", "failed"]
        kinds = [event.kind for event in story_with_faults(last_run().path)[0]]
        assert kinds == ["started", "failed"]
        assert "runner.max_steps" in (last_run().path / "origins.json").read_text()
        diagnostic = read_provenance(last_run().path)
        assert diagnostic is not None
        assert diagnostic.code["rlinf_core"]

    def test_its_folder_tells_of_it(self, cli: Cli) -> None:
        cli("train", "recipe=fake")
        run = last_run()
        state = run.state
        assert (state.status, state.step, state.recipe, state.reason) == ("finished", 12, "fake", "")
        assert "max_steps: 12" in run.config_file.read_text()
        log = run.log_file("driver", 0).read_text()
        assert "INFO [driver] evaluated at step 10: success 0.75, return 9\n" in log
        assert "WARNING [driver] something is odd\n" in log

    @pytest.mark.security
    @pytest.mark.parametrize("options", [(), ("--json",), ("--quiet",), ("--verbose",)], ids=str)
    def test_no_secret_is_kept_or_shown(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
    ) -> None:
        secrets = ["key-of-the-file", 'to"ken\\of the/environment', "password&of/the=base"]
        monkeypatch.setenv("HF_TOKEN", secrets[1])
        monkeypatch.setenv("DB_PASSWORD", secrets[2])
        monkeypatch.setenv("RLINF_REPORT", "1")
        values = [f"fake.api_key={secrets[0]}", "fake.address=sql://${env:DB_PASSWORD}@host", "fake.fail=leak"]
        ended = cli("train", "recipe=fake", *values, *options)
        assert ended.code != 0
        run = last_run().path
        texts = {str(path): path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()}
        texts |= {"standard output": ended.out, "standard error": ended.err}
        assert "raised ********" in texts[str(run / "run.json")]
        assert "why ********" in texts[str(run / "events.jsonl")]
        assert "raised ********" in texts[str(run / "report.html")]
        assert "logged ********" in texts[str(run / "logs/driver/rank_0.log")]
        forms = [
            form
            for secret in secrets
            for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""), escape(secret))
        ]
        assert {name: form for name, text in texts.items() for form in forms if form in text} == {}

    def test_quiet_and_verbose(self, cli: Cli) -> None:
        ended = cli("train", "recipe=fake", "--quiet")
        assert ended.out.startswith("finished\n")
        assert ended.err == "a worker prints\n"
        ended = cli("train", "recipe=fake", "--verbose", "runner.max_steps=5")
        assert "  steps       5, in" in ended.out
        assert len([line for line in ended.err.splitlines() if line.startswith("step ")]) == 5

    def test_json(self, cli: Cli, contract: Callable[[str, str], Any]) -> None:
        data = contract("train", cli("train", "recipe=fake", "--json").out)
        assert (data["status"], data["step"], data["last_step"], data["restarts"]) == ("finished", 12, 12, 0)
        assert data["metrics"]["env/success_at_end"] == 0.9
        assert data["evaluation"] == {"step": 10, "metrics": {"eval/success_at_end": 0.75, "eval/return": 9.0}}
        assert Path(data["folder"]) == last_run().path

    def test_a_file_of_its_own_or_from_standard_input(self, cli: Cli, rlinf: Cli, folder: Path) -> None:
        text = (Path(__file__).parents[2] / "packages" / "fake.yaml").read_bytes()
        (folder / "job.yaml").write_bytes(text)
        assert cli("train", "job.yaml", "-q").code == 0
        assert rlinf("train", "-", "-q", stdin=text).code == 0

    def test_it_does_not_import_ray_or_torch(self, folder: Path) -> None:
        code = (
            "import sys; from rlinf_cli.main import main; code = main(['train', 'recipe=fake', '-q']);"
            "print([name for name in ('ray', 'torch', 'rich.live') if name in sys.modules], file=sys.stderr);"
            "sys.exit(code)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr.splitlines()[-1] == "[]"


class TestADryRun:
    def test_the_plan_and_the_config(self, cli: Cli, folder: Path) -> None:
        ended = cli("train", "recipe=fake", "--dry-run", "runner.max_steps=7")
        assert ended.code == 0
        assert "actor + rollout share node 0" in ended.out
        assert "  max_steps: 7" in ended.out
        assert "keep_checkpoints: 3" in ended.out
        assert ended.err == "\nnothing was started, and nothing written\n"
        assert list(folder.iterdir()) == []

    def test_json(self, cli: Cli, folder: Path) -> None:
        data = json.loads(cli("train", "recipe=fake", "--dry-run", "--json").out)
        assert (data["schema"], data["recipe"]) == ("rlinf.plan/1", "fake")
        assert data["placement"]["components"]["rollout"]["world_size"] == 2
        assert data["config"]["config"]["runner"]["max_steps"] == 12
        data = json.loads(cli("train", "recipe=fake", "--dry-run", "--json", "--runs-dir", "my runs").out)
        assert data["config"]["config"]["runner"]["logger"]["log_path"] == "my runs"
        assert list(folder.iterdir()) == []

    def test_accelerators_can_be_assumed(self, cli: Cli, folder: Path) -> None:
        (folder / "job.yaml").write_text("recipe: fake\ncluster: {num_nodes: 1, component_placement: {actor: 0-7}}\n")
        assert "the accelerators of the nodes are unknown" in cli.fails(2, "train", "job.yaml", "--dry-run")
        assert "accelerators 0-7" in cli.out("train", "job.yaml", "--dry-run", "--assume", "8")
        ended = cli("train", "job.yaml", "runner.max_steps=2")
        assert ended.code == 0
        assert "the placement depends on the nodes' accelerators, which the file does not declare" in ended.err


class TestMistakes:
    @pytest.mark.parametrize(
        ("code", "typed", "said"),
        [
            (2, "recipe=fak", "there is no recipe `fak`"),
            (2, "fak", "did you mean `fake`?"),
            (2, "runner.max_steps=3", "name a file or a recipe, as in `rlinf train embodied`"),
            (2, "a.yaml b.yaml", "one file at a time, not 2"),
            (2, "hetero18", "the file selects no recipe, so there is nothing to run"),
            (2, "missing.yaml", "missing.yaml"),
            (2, "recipe=fake fake.secnds=3", "error[unknown-key]: unknown key `secnds` in `fake`"),
            (2, "recipe=fake --assume 8", "use it with --dry-run"),
            (2, "recipe=fake cluster.forward_env=[NO_SUCH]", "`cluster.forward_env` names `NO_SUCH`"),
            (2, "recipe=fake --dry-run cluster.forward_env=[NO_SUCH]", "`cluster.forward_env` names `NO_SUCH`"),
            # Before anything else: whoever corrects the file, or reads where its processes go, would do it in vain.
            (1, "recipe=unprogrammed no.such.key=1", "error: recipe `unprogrammed` cannot be run yet"),
        ],
    )
    def test_of_the_command_line(self, cli: Cli, folder: Path, code: int, typed: str, said: str) -> None:
        err = " ".join(cli.refuses(code, "train", *typed.split()).split())
        assert said in err
        assert code == 2 or err.startswith(said)
        assert list(folder.iterdir()) == []

    def test_packages_that_are_missing(self, cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else object())
        err = cli.refuses(1, "train", "recipe=fake")
        assert "error: training needs `ray`, not installed in this Python\n" in err
        assert f"run `{sys.executable} -m pip install 'ray>=2.54,<2.61'`" in err
        assert list(folder.iterdir()) == []

    def test_a_folder_that_cannot_be_written(self, cli: Cli, folder: Path) -> None:
        (folder / "runs").write_text("a file")
        err = cli.fails(1, "train", "recipe=fake", "-q")
        assert "error: the run folder cannot be written" in err
        assert "a worker prints" not in err


class TestAFailure:
    def test_of_a_worker(self, cli: Cli) -> None:
        err = cli.refuses(1, "train", "recipe=fake", "fake.fail=workers", "-q")
        run = last_run()
        _, first, where, *rest = err.splitlines()
        assert first == "error: `rollout:1` failed in `generate`: ValueError: bad action: nan"
        assert where.startswith("  where: node 0 (127.0.0.1), pid 4711; ")
        assert "         because of it also failed: rollout:0 (WorkerDiedError)" in rest
        assert "           2026-01-01 10:00:04,000 INFO [rollout:1] line 4" in rest
        assert "Traceback" not in err
        assert (run.state.status, run.state.step) == ("failed", 2)
        assert run.state.reason == "`rollout:1` failed in `generate`: ValueError: bad action: nan"
        assert "Traceback" in run.log_file("driver", 0).read_text()
        assert "Traceback" in cli("train", "recipe=fake", "fake.fail=workers", "--verbose").err

    def test_of_the_cluster_is_3(self, cli: Cli) -> None:
        assert "error: 2 of 3 nodes joined within 30 s\n  where: 10.0.0.1:6379\n" in cli.fails(
            3, "train", "recipe=fake", "fake.fail=cluster", "-q"
        )

    def test_of_the_program(self, cli: Cli, contract: Callable[[str, str], Any]) -> None:
        ended = cli("train", "recipe=fake", "fake.fail=bug", "-q", "--json")
        assert ended.code == 1
        assert "the driver failed: KeyError: 'surprise'" in ended.err
        data = contract("train", ended.out)
        assert (data["status"], data["step"]) == ("failed", 2)
        assert data["reason"] == "the driver failed: KeyError: 'surprise'"

    def test_that_is_no_exception_and_has_no_words(self, cli: Cli) -> None:
        err = cli.refuses(1, "train", "recipe=fake", "fake.fail=panic", "-q")
        assert "the driver failed: fakerecipe.Panic: (its message cannot be shown: ValueError)" in err
        assert last_run().state.status == "failed"
        assert len(list((last_run().path / "evidence").iterdir())) == 1

    def test_that_a_broken_disk_keeps_from_being_written_is_told_too(
        self, cli: Cli, contract: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken_disk_for('"failed"', monkeypatch)
        ended = cli("train", "recipe=fake", "fake.fail=bug", "-q", "--json")
        assert ended.code == 1
        assert "the driver failed: KeyError: 'surprise'" in ended.err
        assert "the end of the run could not be recorded in " in ended.err
        assert "Input/output error" in ended.err
        assert contract("train", ended.out)["status"] == "failed"

    def test_is_recorded_once_there_is_room_again(
        self, cli: Cli, contract: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept, tries = durable.write_short, [1, 2]

        def write_short(path: Path, text: str) -> None:
            if '"failed"' in text and tries:
                tries.pop()
                raise OSError(28, "No space left on device")
            kept(path, text)

        monkeypatch.setattr(durable, "write_short", write_short)
        ended = cli("train", "recipe=fake", "fake.fail=bug", "-q", "--json")
        assert (ended.code, tries) == (1, [])
        assert "could not be recorded" not in ended.err
        assert last_run().state.status == "failed"

    def test_of_the_log_is_told_once(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def emit(handler: logging.FileHandler, record: logging.LogRecord) -> None:
            try:
                raise OSError(28, "No space left on device")
            except OSError:
                handler.handleError(record)

        monkeypatch.setattr(logging.FileHandler, "emit", emit)
        ended = cli("train", "recipe=fake")
        assert ended.code == 0
        assert ended.err.count("can no longer be written: [Errno 28] No space left on device") == 1
        assert "Traceback" not in ended.err

    def test_an_end_that_cannot_be_written_is_no_success(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        broken_disk_for('"finished"', monkeypatch)
        assert "error: the run folder cannot be written" in cli.refuses(1, "train", "recipe=fake", "-q")
        assert last_run().state.status == "failed"


class TestAnEndBeforeItsTime:
    @pytest.mark.parametrize(
        ("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
    )
    def test_by_a_signal(self, sent: signal.Signals, code: int, word: str) -> None:
        process = start("fake.seconds=0.2", "runner.max_steps=1000")
        process.send_signal(sent)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (code, "")
        state = last_run().state
        # The step under way is finished, as far as there was one.
        assert state.step in (1, 2)
        assert f"{word} after step {state.step}; the run folder is runs/" in err
        assert "\nnothing was saved: no checkpoint was written\n" in err
        assert "Traceback" not in err
        assert (state.status, state.reason) == ("interrupted", word)

    def test_by_a_signal_that_comes_with_the_run_folder(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = RunFolder.write_config_text

        def write_config_text(run: RunFolder, text: str) -> str:
            # `rlinf stop` has found the folder, and its process has no handlers yet.
            os.kill(os.getpid(), signal.SIGTERM)
            return kept(run, text)

        monkeypatch.setattr(RunFolder, "write_config_text", write_config_text)
        assert "a worker prints" not in cli.fails(143, "train", "recipe=fake")
        assert (last_run().state.status, last_run().state.reason) == ("interrupted", "terminated")

    def test_by_two_signals_is_hard(self) -> None:
        process = start("fake.seconds=0.2", "fake.end=500", "runner.max_steps=1000")
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        for line in process.stderr:
            if line == "ending; press Ctrl-C again to end at once\n":
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert last_run().state.status == "interrupted"

    def test_by_kill_is_seen_from_outside(self) -> None:
        process = start("fake.seconds=0.2", "runner.max_steps=1000")
        assert last_run().state.alive
        process.kill()
        process.communicate(timeout=30)
        state = last_run().state
        assert state.status == "running"
        assert not state.alive
        assert state.outcome[0] == "failed"


class TestDetached:
    def test_it_goes_on_when_the_command_has_returned(self, rlinf: Cli) -> None:
        ended = rlinf("train", "recipe=fake", "--detach", "fake.seconds=0.01")
        assert ended.code == 0
        shown, _, pid = ended.out.strip().partition(", process ")
        assert f"  rlinf logs {shown} --follow\n  rlinf stop {shown}\n" in ended.err
        run = RunFolder.open(shown)
        deadline = time.monotonic() + 30
        # It says that it is finished, and then prints its summary.
        while identity(int(pid)) == run.state.start and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (run.refresh().status, run.state.pid) == ("finished", int(pid))
        printed = run.log_file("output", 0).read_text()
        assert "a worker prints\n" in printed
        assert "  run folder  " in printed

    def test_json(self, rlinf: Cli, contract: Callable[[str, str], Any]) -> None:
        ended = rlinf("train", "recipe=fake", "--detach", "--json")
        data = contract("train", ended.out)
        assert (data["status"], data["step"]) == ("running", 0)
        assert RunFolder.open(data["folder"]).state.pid == data["pid"]

    def test_what_keeps_it_from_starting_is_said_here(self, rlinf: Cli, folder: Path) -> None:
        (folder / "runs").write_text("a file")
        assert "error: the run folder cannot be written" in rlinf.refuses(1, "train", "recipe=fake", "--detach")


@pytest.mark.parametrize("recipe", ["math", "embodied"])
def test_skipped_checks_are_a_key_where_the_recipe_has_it(rlinf: Cli, recipe: str) -> None:
    shown = rlinf.out("train", f"recipe={recipe}", "--skip-checks", "--dry-run")
    assert "skip_checks: true" in shown.replace("  ", " ")
