"""`rlinf train` with its driver elsewhere, and on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.job.load import load_job
from rlinf_core.node import attach, cluster_records, node_facts
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode
from tests.unit.cli.typed import Cli

FILE = """\
recipe: fake
cluster:
  num_nodes: 1
  hosts: [trainer]
  component_placement:
    actor: {node_group: node, placement: 0}
fake: {fail: "${env:HOW:-bug}"}
"""


class Head:
    """Stands for the head: remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], str]] = []
        self.env: dict[str, str] | None = None

    def __call__(
        self, record: ClusterRecord, arguments: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> int:
        self.asked.append((record.name, arguments, stdin.decode()))
        self.env = env
        return 143


@pytest.fixture
def head(fake_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr("rlinf_cli.cluster.node.node_requests.run_on_head", made)
    monkeypatch.setattr(attach, "known", lambda: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(fake_recipe / "state"))
    monkeypatch.setattr(attach, "running_here", lambda: iter(()))
    for name in ("RLINF_ADDRESS", "RLINF_CLUSTER"):
        monkeypatch.setenv(name, "")
    (fake_recipe / "farm.yaml").write_text(FILE)
    return made


def section_of(file: str, *overrides: str) -> str:
    job = load_job(file, overrides, environ={})
    assert job.cluster is not None
    return cluster_records.section_digest(job.cluster)


def record(name: str, machine: str = "another") -> None:
    node = RecordedNode(0, "trainer", ("cluster",), "/usr/bin/python3", {}, machine=machine)
    section = section_of("farm.yaml")
    cluster_records.save(
        ClusterRecord(name, "1234", "farm.yaml", "10.0.0.1:6379", False, (20000, 20999), (node,), section=section)
    )


def test_the_driver_goes_to_the_head(cli: Cli, head: Head, fake_recipe: Path) -> None:
    record("farm")
    err = cli.refuses(143, "train", "farm.yaml", "runner.max_steps=7", "--json", "--verbose")
    assert "the driver and the run folder are on trainer" in err
    ((name, arguments, text),) = head.asked
    assert name == "farm"
    assert arguments == ["-P", "-m", "rlinf_cli", "train", "-", "--remote-driver", "--verbose", "--json"]
    # Overrides and references have been followed.
    job = load_job("-", stdin=text.encode(), environ={})
    assert job.ok
    config: Any = job.config
    assert (config.runner.max_steps, config.fake.fail) == (7, "bug")
    assert not (fake_recipe / "runs").exists()


def test_forwarded_variables_have_the_values_of_this_machine(
    cli: Cli, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    record("farm")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t $HOME")
    arguments = ("train", "farm.yaml", "cluster.forward_env=[WANDB_API_KEY, MODE]", "runner.max_steps=7")
    refused = cli(*arguments)
    assert (refused.code, head.asked) == (2, [])
    assert "`cluster.forward_env` names `MODE`, which is not set here" in refused.err
    monkeypatch.setenv("MODE", "")
    ended = cli(*arguments)
    assert (ended.code, head.env) == (143, {"WANDB_API_KEY": "s3cr3t $HOME", "MODE": "", "RLINF_CLAIMS": "wait"})
    ((_, words, text),) = head.asked
    assert "s3cr3t" not in ended.err + ended.out + text + " ".join(words)


def test_what_the_file_says_is_told_once(cli: Cli, head: Head, rlinf: Cli) -> None:
    record("farm")
    table = "component  processes  group  nodes  units   per process"
    here = cli("train", "farm.yaml")
    assert here.err.count(table) == 1
    ((_, arguments, text),) = head.asked
    there = rlinf(*arguments[3:], stdin=text.encode(), environ={"RLINF_ADDRESS": "10.0.0.1:6379"})
    assert there.code == 0
    assert table not in there.err
    assert "run folder: runs/" in there.err


def test_a_node_of_the_cluster_runs_its_driver_itself(cli: Cli, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    record("farm", machine=node_facts.machine())
    here = attach.Known("farm", "10.0.0.1:6379", None, 1, interpreter=sys.executable, section=section_of("farm.yaml"))
    monkeypatch.setattr(attach, "running_here", lambda: iter((here,)))
    monkeypatch.setattr(attach, "known", lambda: here)
    ended = cli("train", "farm.yaml", "runner.max_steps=2")
    assert ended.code == 0
    assert "runs on cluster farm, head 10.0.0.1:6379\n" in ended.err
    assert os.environ["RLINF_CLUSTER"] == "farm"
    assert head.asked == []


def test_a_machine_without_a_cluster_runs_its_own(cli: Cli, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALONE in said_by(cli, *ONE_NODE)
    # An address is joined from here.
    monkeypatch.setenv("RLINF_ADDRESS", "10.0.0.1:6379")
    assert "runs on the cluster at 10.0.0.1:6379\n" in said_by(cli, "train", "farm.yaml", "runner.max_steps=2")
    assert head.asked == []


ONE_NODE = ("train", "farm.yaml", "cluster.hosts=[]", "runner.max_steps=2")
ALONE = "runs on a private Ray on this machine\n"
JOINED = "runs on cluster laptop, head 127.0.0.1:20000\n"
TOO = "cluster `laptop` runs here too: it"
HOW = "`RLINF_CLUSTER=laptop` runs the job on it"


def said_by(cli: Cli, *arguments: str, code: int = 0) -> str:
    """Return what a run says beside its result."""
    ended = cli(*arguments)
    assert ended.code == code, ended.err
    return ended.err


@pytest.fixture
def laptop(head: Head, monkeypatch: pytest.MonkeyPatch) -> list[attach.Known]:
    """A cluster on this machine that was brought up from the same section and interpreter, and may be changed."""
    section = section_of("farm.yaml", "cluster.hosts=[]")
    running = [
        attach.Known("laptop", "127.0.0.1:20000", None, 1, interpreter=sys.executable, path="/x.yaml", section=section)
    ]
    monkeypatch.setattr(attach, "running_here", lambda: iter(running))
    monkeypatch.setattr(attach, "known", lambda: next(iter(running), None))
    return running


def test_several_clusters_with_an_equal_section_are_named(cli: Cli, laptop: list[attach.Known]) -> None:
    laptop.append(laptop[0]._replace(name="desktop"))
    err = cli.fails(3, *ONE_NODE)
    assert "several clusters of the file's machines run here: `laptop`, `desktop`" in err
    assert "`RLINF_CLUSTER`" in err


def test_a_cluster_of_a_base_is_joined(cli: Cli, laptop: list[attach.Known], fake_recipe: Path) -> None:
    (fake_recipe / "job.yaml").write_text("extends: farm.yaml\ncluster: {hosts: [], ports: 21000-21999}\n")
    laptop[0] = laptop[0]._replace(section="another", path=str((fake_recipe / "farm.yaml").resolve()))
    assert JOINED in said_by(cli, "train", "job.yaml", "runner.max_steps=2")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, [JOINED]),
        ({"section": "another"}, [ALONE, f"{TOO} was brought up from /x.yaml, whose `cluster` section differs", HOW]),
        (
            {"section": "", "path": ""},
            [ALONE, f"{TOO} was brought up from another file, whose `cluster` section differs", HOW],
        ),
        (
            {"interpreter": "/opt/other/bin/python3"},
            [ALONE, f"{TOO} runs with /opt/other/bin/python3, the job with", HOW],
        ),
    ],
    ids=["equal", "section", "file", "interpreter"],
)
def test_a_job_of_one_node_keeps_out_of_another_cluster(
    cli: Cli, laptop: list[attach.Known], change: dict[str, str], says: list[str]
) -> None:
    laptop[0] = laptop[0]._replace(**change)
    err = said_by(cli, *ONE_NODE)
    assert [words for words in says if words not in err] == []


def test_a_named_cluster_is_joined_as_it_is(
    cli: Cli, laptop: list[attach.Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop[0] = laptop[0]._replace(section="another", interpreter="/opt/other/bin/python3")
    monkeypatch.setenv("RLINF_CLUSTER", "laptop")
    assert JOINED in said_by(cli, *ONE_NODE)


def test_the_record_of_another_file_of_that_name_is_not_followed(cli: Cli, head: Head) -> None:
    record("farm")
    err = said_by(cli, "train", "farm.yaml", "cluster.ports=21000-21999", code=3)
    assert "cluster `farm` is up, but not for this file" in err
    assert head.asked == []
    # The machines are the same with other spares and another placement.
    of_job = ("cluster.spare_nodes=1", "cluster.component_placement={}", "cluster.forward_env=[HOME]")
    assert section_of("farm.yaml", "cluster.num_nodes=3") == section_of("farm.yaml", "cluster.num_nodes=3", *of_job)


def test_a_job_of_several_nodes_names_both(cli: Cli, laptop: list[attach.Known]) -> None:
    err = said_by(cli, *ONE_NODE, "cluster.num_nodes=2", code=3)
    assert "cluster `laptop` is up, but not for this file" in err
    assert "it was brought up from /x.yaml" in err
    assert f"{HOW}; `rlinf up farm.yaml` brings up" in err


def test_hosts_that_nobody_brought_up(cli: Cli, head: Head, fake_recipe: Path) -> None:
    assert "error: the file's machines are not up\n  where: farm.yaml\n" in cli.refuses(3, "train", "farm.yaml", "-q")
    assert not (fake_recipe / "runs").exists()


pexpect: Any = pytest.importorskip("pexpect")

RLINF = Path(sys.executable).with_name("rlinf")
SHOW_CURSOR = "\x1b[?25h"
Start = Callable[..., Any]


@pytest.fixture
def start(fake_recipe: Path) -> Iterator[Start]:
    """Starts `rlinf train recipe=fake` on a terminal."""
    children: list[Any] = []

    def run(*arguments: str, **environ: str) -> Any:
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        child = pexpect.spawn(
            str(RLINF),
            ["train", "recipe=fake", *arguments],
            cwd=str(fake_recipe),
            env=environment | {"TERM": "xterm-256color"} | environ,
            dimensions=(24, 80),
            timeout=60,
            encoding="utf-8",
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.close(force=True)


def end(child: Any) -> tuple[int, str]:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, child.before


def test_the_block_is_drawn_and_gone_at_the_end(start: Start) -> None:
    child = start("fake.launch=0.5", "fake.seconds=0.1")
    child.expect("waiting for rollout: 2 processes")
    child.expect("at most 30 s")
    child.expect("collecting rollouts")
    code, rest = end(child)
    assert code == 0
    assert SHOW_CURSOR in rest
    last = rest[rest.rindex(SHOW_CURSOR) :]
    assert "finished" in last
    assert "collecting rollouts" not in last
    # What lasts stays above the block.
    assert "evaluated at step 10: success 0.75, return 9" in rest


@pytest.mark.parametrize("seconds", [0, 500])
def test_ctrl_c_leaves_the_terminal_as_it_was(start: Start, seconds: int) -> None:
    child = start("fake.seconds=0.1", f"fake.end={seconds}", "runner.max_steps=100000")
    child.expect("collecting rollouts")
    child.sendintr()
    if seconds:
        child.expect("ending; press Ctrl-C again to end at once")
        child.sendintr()
    code, rest = end(child)
    assert code == 130
    assert SHOW_CURSOR in rest
    assert seconds or "interrupted after step" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("refusal", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=lambda item: next(iter(item)))
def test_a_terminal_that_wants_no_bars_gets_lines(start: Start, refusal: dict[str, str]) -> None:
    code, shown = end(start(**refusal))
    assert code == 0
    assert "\x1b" not in shown
    assert "step 12/12  success 0.9, return 12.5, length 40" in shown


def settled(screen: str) -> bool:
    """Return whether a screen shows the block once, whole, and below what has happened."""
    lines = [line for line in screen.splitlines() if line]
    above, _, block = "\n".join(lines).partition("\nfake   ")
    names = [line.split()[0] for line in block.splitlines()[1:]]
    return (
        names == ["step", "train", "learn", "time", "eval", "saved", "now"]
        and re.search(r"\nstep   \d+/100000  ─{24} 0%  [\d.]+ steps/s  [\d:]+, ", block) is not None
        and re.search(r"\nevaluated at step (\d+): success 0.75, return 9\nsaved global_step_\1$", above) is not None
    )


def test_the_screen_never_scrolls_sideways(fake_recipe: Path) -> None:
    """tmux keeps the screen as a terminal does: the block is whole, once, and below what has happened."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    name = f"rlinf-test-{os.getpid()}"
    tmux = ["tmux", "-L", name]
    steps = "runner.max_steps=100000 runner.save_interval=10 runner.val_check_interval=10"
    command = f"{RLINF} train recipe=fake fake.seconds=0.3 {steps}"
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TMUX")}
    subprocess.run(
        [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "30", command], check=True, env=environ
    )
    try:
        deadline = time.monotonic() + 60
        screen = ""
        # Between two drawings a picture may be taken of half a block.
        while not settled(screen) and time.monotonic() < deadline:
            screen = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
            time.sleep(0.1)
        assert settled(screen), screen
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
