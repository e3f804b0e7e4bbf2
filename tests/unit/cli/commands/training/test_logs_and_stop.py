"""`rlinf logs` and `rlinf stop`: of the running or the last run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.runs.logs import ALL, Follower, entries, last_lines, merged, tail
from rlinf_cli.runs.run_lookup import find_run
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.process.proc import identity, stat
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.typed import Cli, text_file
from tests.waiting import until

RLINF = Path(sys.executable).with_name("rlinf")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that is finished, with logs of three processes."""
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create(RunnerConfig(), "embodied")
    write(made, "driver", 0, "10:00:00,000 INFO [driver] step 1", "10:00:04,000 INFO [driver] step 2")
    failed = "Traceback (most recent call last):"
    write(made, "actor", 0, "10:00:01,000 INFO [actor:0] a", "10:00:03,000 ERROR [actor:0] b", failed)
    write(made, "env", 0, "10:00:02,500 INFO [env:0] c")
    write(made, "env", 10, "10:00:02,000 INFO [env:10] d")
    made.update(step=2)
    made.end(RunStatus.FINISHED)
    return made


@contextmanager
def following() -> Generator[subprocess.Popen[str]]:
    """A process that follows the run under way, which has written a line."""
    command = [RLINF, "logs", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("before\n")
        yield process


def running_run() -> RunFolder:
    running = RunFolder.create(RunnerConfig(), "embodied")
    write(running, "actor", 0, "10:00:00,000 INFO [actor:0] before")
    return running


def write(run: RunFolder, component: str, rank: int, *lines: str) -> None:
    file = run.log_file(component, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"2026-01-02 {line}\n" if line[0].isdigit() else f"{line}\n" for line in lines)
    with file.open("a") as opened:
        opened.write(text)


class TestLogs:
    def test_all_in_the_order_of_time(self, cli: Cli, run: RunFolder) -> None:
        ended = cli("logs")
        assert ended.code == 0
        assert ended.out.splitlines() == [
            "2026-01-02 10:00:00,000 INFO [driver] step 1",
            "2026-01-02 10:00:01,000 INFO [actor:0] a",
            "2026-01-02 10:00:02,000 INFO [env:10] d",
            "2026-01-02 10:00:02,500 INFO [env:0] c",
            "2026-01-02 10:00:03,000 ERROR [actor:0] b",
            "Traceback (most recent call last):",
            "2026-01-02 10:00:04,000 INFO [driver] step 2",
        ]
        assert ended.err == f"runs/{run.path.name}: finished, step 2 done\n"

    def test_of_a_component_and_a_rank(self, cli: Cli, run: RunFolder) -> None:
        assert len(cli("logs", "--component", "env").out.splitlines()) == 2
        assert cli("logs", "--component", "env", "--rank", "10").out.endswith("[env:10] d\n")
        assert len(cli("logs", "--rank", "0").out.splitlines()) == 6

    def test_the_last_lines(self, cli: Cli, run: RunFolder) -> None:
        assert cli("logs", "--lines", "2").out.splitlines() == [
            "Traceback (most recent call last):",
            "2026-01-02 10:00:04,000 INFO [driver] step 2",
        ]
        assert cli("logs", "--lines", "0").out == ""
        assert len(cli("logs", "--lines", "-1").out.splitlines()) == 7

    def test_last_line_without_an_end_is_shown(self, cli: Cli, run: RunFolder) -> None:
        with run.log_file("driver", 0).open("a") as file:
            file.write("2026-01-02 10:00:05,000 INFO [driver] killed in mid-")
        for how in ((), ("--follow",), ("driver", "--lines", "1")):
            assert cli("logs", *how).out.splitlines()[-1].endswith("killed in mid-")

    def test_folder_of_a_components_name_is_not_meant(self, cli: Cli, run: RunFolder, tmp_path: Path) -> None:
        (tmp_path / "env").mkdir()
        (tmp_path / "notes").mkdir()
        assert len(cli("logs", "env").out.splitlines()) == 2
        err = cli.refuses(1, "logs", "notes")
        assert "this folder is not a run" in err
        assert "do: name a run folder\n" in err

    def test_a_run_by_path_and_by_name(self, cli: Cli, run: RunFolder, tmp_path: Path) -> None:
        for name in (run.path, run.path.name, f"runs/{run.path.name}"):
            assert len(cli("logs", name).out.splitlines()) == 7
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        assert cli("logs").code == 1
        assert len(cli("logs", "--runs-dir", tmp_path / "runs").out.splitlines()) == 7

    @pytest.mark.parametrize(
        ("arguments", "what", "do"),
        [
            (("embodide",), "there is no run `embodide`, and no such component", "`actor`, `driver`, `env`"),
            (("actr",), "there is no run `actr`, and no such component", "did you mean `actor`?"),
            (("env:3",), "this run has no log of rank 3", "ranks that have logs: 0, 10"),
            (("env", ":3"), "this run has no log of rank 3", "ranks that have logs: 0, 10"),
        ],
    )
    def test_what_is_not_there(self, cli: Cli, run: RunFolder, arguments: tuple[str, ...], what: str, do: str) -> None:
        err = cli.refuses(1, "logs", *arguments)
        assert f"error: {what}" in err
        assert do in err

    def test_where_nothing_ran(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli.fails(1, "logs").startswith("error: there is no run\n  where: runs\n")

    def test_the_running_one_comes_before_the_last(self, cli: Cli, run: RunFolder) -> None:
        running_run()
        RunFolder.create(RunnerConfig(), "embodied").end(RunStatus.FINISHED)
        ended = cli("logs")
        assert ended.out.endswith("before\n")
        assert "running, no step done; `--follow` continues" in ended.err

    def test_following_until_the_end(self, run: RunFolder) -> None:
        running = running_run()
        with following() as process:
            assert process.stdout is not None
            assert process.stderr is not None
            write(running, "actor", 0, "10:00:01,000 INFO [actor:0] more")
            assert process.stdout.readline().endswith("more\n")
            # A file that comes later is followed, too, and half a line waits for its other half.
            write(running, "env", 0, "10:00:02,000 INFO [env:0] new")
            assert process.stdout.readline().endswith("new\n")
            with running.log_file("env", 0).open("a") as file:
                file.write("2026-01-02 10:00:03,000 INFO [env:0] ha")
                file.flush()
                write(running, "actor", 0, "10:00:04,000 INFO [actor:0] last")
                assert process.stdout.readline().endswith("last\n")
                file.write("lf\n")
            running.end(RunStatus.FINISHED)
            assert process.stdout.read().endswith("half\n")
            assert process.wait(timeout=30) == 0
            assert f"runs/{running.path.name}: finished" in process.stderr.read()

    def test_ctrl_c_ends_following(self, run: RunFolder) -> None:
        running_run()
        with following() as process:
            assert process.stderr is not None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert process.stderr.read() == ""


class TestReading:
    def test_the_end_of_a_large_file(self, tmp_path: Path) -> None:
        file = tmp_path / "log"
        lines = [f"line {i} {'x' * (i % 300)}" for i in range(5000)]
        file.write_text("\n".join(lines) + "\n")
        for count in (0, 1, 7, 1000, 4999, 5000, 6000):
            assert last_lines(file, count) == lines[len(lines) - min(count, 5000) :]
        assert last_lines(file, ALL) == lines
        assert tail(file, 3)[2] == file.stat().st_size

    def test_a_last_line_without_an_end(self, tmp_path: Path) -> None:
        file = tmp_path / "log"
        assert last_lines(file, 3) == []
        assert Follower(file, 0).read() == []
        file.write_bytes(b"one\ntwo\xff\nthr")
        assert last_lines(file, 2) == ["two\ufffd", "thr"]
        assert tail(file, 5) == (["one", "two\ufffd"], "thr", 9)

    def test_a_file_that_begins_anew(self, tmp_path: Path) -> None:
        file = text_file(tmp_path / "log", "a long first line\n")
        follower = Follower(file, file.stat().st_size)
        file.write_text("new\n")
        assert follower.read() == ["new"]

    def test_lines_without_a_moment_stay_where_they_are(self) -> None:
        first = entries(["no moment", "2026-01-02 10:00:05,000 INFO a", "  more of a"], "2026-01-02 10:00:09,000 ")
        second = entries(["2026-01-02 10:00:06,000 INFO b"])
        assert merged([first, second]) == [
            "2026-01-02 10:00:05,000 INFO a",
            "  more of a",
            "2026-01-02 10:00:06,000 INFO b",
            "no moment",
        ]


class TestStop:
    @pytest.fixture(autouse=True)
    def _recipe(self, fake_recipe: Path) -> None:
        return

    def detached(self, rlinf: Cli, *arguments: str) -> RunFolder:
        out = rlinf.out("train", "recipe=fake", "--detach", "fake.seconds=0.1", "runner.max_steps=10000", *arguments)
        return RunFolder.open(out.partition(",")[0])

    def test_it_ends_the_run(self, cli: Cli, rlinf: Cli) -> None:
        run = self.detached(rlinf)
        pid = run.state.pid
        assert cli.out("stop").startswith(f"runs/{run.path.name} has ended: process {pid}, after step ")
        assert identity(pid) is None
        assert (run.refresh().status, run.state.reason) == ("interrupted", "terminated")
        assert (
            f"error: no run is active\n  where: runs\n    why: the last, {run.path.name}, is interrupted"
            in cli.fails(1, "stop")
        )
        named = cli("stop", run.path.name)
        assert (named.code, named.out) == (0, f"runs/{run.path.name} is already interrupted\n")

    @pytest.mark.parametrize("seconds", ["nan", "inf", "-inf"])
    def test_time_limit_is_a_number(self, cli: Cli, seconds: str) -> None:
        assert "'--timeout'" in cli.refuses(2, "stop", f"--timeout={seconds}")

    def test_it_ends_by_a_link_within_any_time(self, cli: Cli, rlinf: Cli) -> None:
        run = self.detached(rlinf)
        (run.path.parent / "latest").symlink_to(run.path.name)
        assert "has ended" in cli.out("stop", "latest", "--timeout", "1e300")

    def test_stopped_driver_is_named_and_can_be_killed(self, cli: Cli, rlinf: Cli) -> None:
        run = self.detached(rlinf)
        pid = run.state.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: stat(pid).is_stopped, "the driver's stop", 30)
            err = cli.fails(1, "stop")
            assert "its driver is stopped, as by SIGSTOP or Ctrl-Z" in err
            assert f"`kill -CONT {pid}`" in err
            killed = cli("stop", "--force")
            assert (killed.code, identity(pid)) == (0, None)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def test_one_that_does_not_end_in_time_and_is_killed(self, cli: Cli, rlinf: Cli) -> None:
        run = self.detached(rlinf, "fake.end=600")
        # Before its first step it would end at once.
        until(lambda: run.refresh().step > 0, "the first step", 60)
        assert "error: the run did not end within 0.3 s" in cli.fails(1, "stop", "--timeout", "0.3")
        assert run.refresh().alive
        cli.out("stop", "--force")
        assert (run.refresh().status, run.state.reason) == ("interrupted", "killed by `rlinf stop --force`")

    def test_one_whose_machine_is_gone_is_given_up_by_force(self, cli: Cli) -> None:
        run = RunFolder.create(RunnerConfig(), "embodied")
        run.update(host="farm-7", boot="00000000-0000-0000-0000-000000000000")
        assert f"process {run.state.pid} on farm-7" in cli.fails(1, "stop")
        assert (run.refresh().status, run.state.going_on) == ("running", True)
        assert f"`rlinf stop runs/{run.path.name} --force` releases the run" in cli.fails(1, "stop", "--force")
        assert run.refresh().going_on
        # The pid is this process's own, on another machine it is another's.
        assert cli.out("stop", run.path.name, "--force").startswith(
            f"runs/{run.path.name} is released after step 0; nothing was killed: its driver was "
        )
        assert (run.refresh().status, run.state.going_on) == ("interrupted", False)
        reason = f"released by `rlinf stop --force`; its driver was process {run.state.pid} on farm-7"
        assert run.state.reason == reason

    def test_one_whose_process_is_gone(self, cli: Cli) -> None:
        run = RunFolder.create(RunnerConfig(), "embodied")
        run.update(start=f"{os.getpid()}:1")
        ended = cli("stop", run.path.name)
        assert (ended.code, ended.out) == (0, f"runs/{run.path.name} is already failed\n")


class TestSeveralLiveRuns:
    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
        """Two that are going on, the older one first."""
        monkeypatch.chdir(tmp_path)
        made = [RunFolder.create(RunnerConfig(), "embodied") for _ in range(2)]
        for number, item in enumerate(made):
            item.update(created=item.state.created + number, step=number)
            write(item, "driver", 0, f"10:00:00,000 INFO [driver] of run {number}")
        return made

    @pytest.mark.parametrize("command", ["logs", "stop"])
    def test_elsewhere_than_on_a_terminal_both_are_named(self, cli: Cli, runs: list[RunFolder], command: str) -> None:
        err = cli.refuses(2, command)
        said = " ".join(err.split())
        names = ", ".join(f"runs/{item.path.name}" for item in runs)
        assert f"2 runs are active: name one of {names}" in said
        assert all(item.refresh().alive for item in runs)

    def test_a_person_is_asked(self, runs: list[RunFolder]) -> None:
        pexpect: Any = pytest.importorskip("pexpect")
        terminal = pexpect.spawn(str(RLINF), ["logs"], encoding="utf-8", timeout=60, dimensions=(40, 200))
        for number, item in enumerate(runs, start=1):
            terminal.expect_exact(f"{number}  runs/{item.path.name}")
            terminal.expect_exact(f"step {number - 1}, process {os.getpid()}")
        terminal.expect_exact("which run: ")
        terminal.sendline("3")
        terminal.expect_exact("a number from 1 to 2")
        terminal.sendline("1")
        terminal.expect_exact("of run 0")
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0

    def test_completion_asks_nobody(self, cli: Cli, runs: list[RunFolder]) -> None:
        assert find_run(None, ask=False).path == runs[1].path
        assert "of run 0" in cli("logs", runs[0].path.name).out


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07 a\rb \x9b2J \u202e [bold]"


def test_logs_show_what_a_terminal_would_act_on(cli: Cli, run: RunFolder) -> None:
    write(run, "env", 3, f"10:00:00,500 INFO [env:3] {HOSTILE}")
    result = cli("logs", str(run.path))
    assert r"\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07" in result.out
    assert r"\x9b2J \u202e [bold]" in result.out
    assert not set(result.out) & set("\x1b\x07\r\x9b\u202e")


@pytest.mark.parametrize("command", ["runs", "runs --json", "runs prune --status finished", "stop x\x1b[2J\x1b[31m"])
def test_run_lists_show_what_a_terminal_would_act_on(cli: Cli, run: RunFolder, command: str) -> None:
    state = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**state, "recipe": HOSTILE, "reason": HOSTILE}))
    result = cli(*command.split())
    assert not set(result.out + result.err) & set("\x1b\x07\r\x9b\u202e")
    assert r"\x1b[2J" in result.out + result.err or "--json" in command
