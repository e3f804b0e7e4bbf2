"""The machines of a file, and what reaches ssh."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster.inventory import NodeTarget, recorded_targets
from rlinf_cli.cluster.node import node_requests
from rlinf_cli.cluster.transport import (
    CommandOutcome,
    CommandResult,
    Transport,
    classify,
    remedy,
    ssh_arguments,
)
from rlinf_core.config.sections.cluster import SshConfig
from rlinf_core.errors import ClusterError, ConfigError
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode

Nodes = Callable[..., tuple[NodeTarget, ...]]

MIXED = """\
cluster:
  num_nodes: 4
  ports: 21000-21499
  ssh: {user: me, options: {ProxyJump: gate}}
  forward_env: [WANDB_API_KEY]
  node_groups:
    - label: train
      node_ranks: 0-1
      hosts: trainer[00-01]
      accelerators: {per_node: 8}
      env_configs:
        - node_ranks: 0
          python_interpreter_path: /opt/a/bin/python
          env_vars: [{A: 1}, {PATH: /opt/a/bin}]
    - label: franka
      node_ranks: 2-3
      hosts: [robot, me@lab]
      ssh: {user: pi, port: 2222, options: {Compression: yes}}
      hardware: {type: Franka, configs: [{node_rank: 3, robot_ip: 10.0.0.9}]}
"""


@pytest.fixture
def mixed(make_nodes: Nodes) -> tuple[NodeTarget, ...]:
    return make_nodes(text=MIXED)


def test_each_node_has_its_host_group_and_interpreter(mixed: tuple[NodeTarget, ...]) -> None:
    assert [(node.rank, node.host, node.groups) for node in mixed] == [
        (0, "trainer00", ("train",)),
        (1, "trainer01", ("train",)),
        (2, "robot", ("franka",)),
        (3, "me@lab", ("franka",)),
    ]
    assert [(node.interpreter, node.declared_interpreter) for node in mixed[:2]] == [
        ("/opt/a/bin/python", True),
        ("/opt/python", False),
    ]
    assert mixed[0].accelerators is not None
    assert mixed[0].accelerators.per_node == 8
    assert [kind for kind, _ in mixed[3].robots] == ["Franka"]
    assert mixed[2].robots == ()


def test_any_group_of_a_node_names_the_model(make_nodes: Nodes) -> None:
    own = "{num_nodes: 1, hosts: h, node_groups: [{label: a, node_ranks: 0, accelerators: {per_node: 8}}, %s]}"
    named = "{label: b, node_ranks: 0, accelerators: {per_node: 8, model: MI300X}}"
    (node,) = make_nodes(text=f"cluster: {own % named}")
    assert node.accelerators is not None
    assert node.accelerators.model == "MI300X"


def test_a_groups_ssh_settings_win_value_by_value(mixed: tuple[NodeTarget, ...]) -> None:
    assert (mixed[0].ssh.user, mixed[0].ssh.port, mixed[0].ssh.options) == ("me", None, {"ProxyJump": "gate"})
    assert (mixed[2].ssh.user, mixed[2].ssh.port) == ("pi", 2222)
    assert mixed[2].ssh.options == {"ProxyJump": "gate", "Compression": "yes"}
    assert mixed[3].ssh.user == "me"  # the host's own
    base, own = SshConfig(port=1, options={"User": "a"}), SshConfig(user="b", options={"Port": "2", "proxyjump": "h"})
    merged = own.over(base)
    assert (merged.user, merged.port, merged.options) == ("b", None, {"Port": "2", "proxyjump": "h"})


def test_ray_gets_no_variable_of_a_group(mixed: tuple[NodeTarget, ...]) -> None:
    assert [node.env for node in mixed[::3]] == [
        {"RLINF_NODE_RANK": rank, "RLINF_PORTS": "21339-21499"} for rank in ("0", "3")
    ]
    assert mixed[0].forwarded == ("WANDB_API_KEY",)


TWO_GROUPS = """\
cluster:
  num_nodes: 2
  node_groups:
    - label: a
      node_ranks: 0-1
      env_configs: [{node_ranks: 0-1, python_interpreter_path: /opt/a/bin/python, env_vars: {A: 1, PATH: /opt/a}}]
    - label: b
      node_ranks: 1
      env_configs: [{node_ranks: 1, python_interpreter_path: /opt/b/bin/python}]
"""


def test_the_environments_of_a_node_are_those_of_its_groups(make_nodes: Nodes) -> None:
    one, both = make_nodes(text=TWO_GROUPS)
    assert (one.interpreter, one.declared_interpreter) == ("/opt/a/bin/python", True)
    # Two groups disagree: Ray runs with neither, but with the path that rlinf itself has.
    assert (both.interpreter, both.declared_interpreter) == ("/opt/python", False)
    assert [environment.label for environment in one.environments] == ["a"]
    assert [(environment.label, environment.interpreter) for environment in both.environments] == [
        ("a", "/opt/a/bin/python"),
        ("b", "/opt/b/bin/python"),
    ]
    assert both.environments[0].request() == {
        "interpreter": "/opt/a/bin/python",
        "env": {"A": "1", "PATH": "/opt/a"},
        "prepended": ["PATH"],
    }


def test_labels_and_names_that_ray_refuses(make_nodes: Nodes) -> None:
    text = "cluster:\n  num_nodes: 1\n  node_groups: [{label: 'a;$(b)', node_ranks: 0}]\n"
    labels = make_nodes(text=text)[0].labels
    assert labels["rlinf.io/rank"] == "0"
    assert labels["rlinf.io/group"].startswith("g-")
    assert labels["rlinf.io/group"][2:].isalnum()
    assert make_nodes(text=text.replace("a;$(b)", "a800"))[0].labels["rlinf.io/group"] == "a800"


def test_the_variables_of_a_group_may_change_while_ray_runs(make_nodes: Nodes, mixed: tuple[NodeTarget, ...]) -> None:
    other = make_nodes(text=MIXED.replace("A: 1", "A: 2"))
    assert mixed[0].fingerprint() == other[0].fingerprint()
    moved = make_nodes(text=MIXED.replace("/opt/a/bin/python", "/opt/c/bin/python"))
    assert mixed[0].fingerprint() != moved[0].fingerprint()


def test_without_hosts_every_node_is_this_machine(make_nodes: Nodes) -> None:
    nodes: Any = make_nodes(text="cluster: {num_nodes: 2}")
    assert [(node.host, node.connect_seconds) for node in nodes] == [(None, 0.0)] * 2
    assert nodes[0].name == "node 0 (this machine)"
    with pytest.raises(ConfigError, match="nodes 1-2 have no host"):
        make_nodes(text="cluster:\n  num_nodes: 3\n  node_groups: [{label: a, node_ranks: 0, hosts: h}]\n")
    # Reaching another one has its own time.
    text = "cluster: {num_nodes: 1, hosts: [h], ssh: {connect_timeout: 3}}"
    assert [node.connect_seconds for node in (*make_nodes(text=text), *make_nodes(1))] == [3.0, 10.0]


def test_recorded_targets_suffice_to_reach_a_node() -> None:
    node = RecordedNode(1, "i", ("g",), "/opt/python", {"user": "me", "options": {"Compression": "yes"}}, "10.0.0.1")
    record = ClusterRecord("a", "1d", "a.yaml", "10.0.0.1:20000", True, (20000, 20999), (node,))
    target = recorded_targets(record)[0]
    assert (target.rank, target.host, target.interpreter, target.ssh.user) == (1, "i", "/opt/python", "me")
    assert target.ssh.options == {"Compression": "yes"}
    assert target.ports.gcs == 20000


FAKE = """\
#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
os.execv("/bin/sh", ["sh", "-c", sys.argv[-1]])
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes its arguments, a line of JSON each time; it is first on PATH."""
    folder, written = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE.format(python=sys.executable, log=str(written)))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return written


def run(node: NodeTarget, argv: list[str], stdin: bytes = b"", deadline: float = 60.0) -> CommandResult:
    return asyncio.run(Transport().run(node, argv, stdin, deadline=deadline))


def test_the_arguments(make_nodes: Nodes, log: Path) -> None:
    text = """\
cluster:
  num_nodes: 2
  hosts: [gpu, me@lab]
  ssh: {user: you, port: 2222, identity_file: ~/.ssh/id, connect_timeout: 2.5, options: {ProxyJump: gate}}
"""
    other, node = make_nodes(text=text)
    assert ssh_arguments(other)[-8:-6] == ["-l", "you"]
    assert run(node, ["echo", "a b"]).stdout == b"a b\n"
    loaded = json.loads(log.read_text())
    assert loaded[-3:] == ["--", "me@lab", "echo 'a b'"]
    options = [loaded[index + 1] for index, word in enumerate(loaded) if word == "-o"]
    assert options[:2] == ["BatchMode=yes", "ProxyJump=gate"]  # what is given first counts
    assert "ConnectTimeout=3" in options
    assert not any(option.startswith("StrictHostKeyChecking") for option in options)  # the user's own config decides
    assert loaded[-7:-3] == ["-p", "2222", "-i", os.path.expanduser("~/.ssh/id")]
    assert "-l" not in loaded  # ssh would take it before the user of the host
    [control] = [option for option in options if option.startswith("ControlPath=")]
    folder = Path(control.removeprefix("ControlPath=").strip('"')).parent
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_a_temporary_folder_of_any_name(make_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="my 5%C ", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        settings = subprocess.run(
            ["ssh", "-G", *ssh_arguments(make_nodes(1)[0])], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    assert f"\ncontrolpath {folder}/rlinf-" in settings


EVIL = ["$(touch {x})", "`touch {x}`", "; touch {x} #", "' ; touch {x} '", '" ; touch {x} "', "a\nb", "-x", "*", "\\"]


@pytest.mark.parametrize("text", EVIL)
def test_no_shell_acts_on_an_argument(make_nodes: Nodes, log: Path, tmp_path: Path, text: str) -> None:
    made = tmp_path / "made"
    text = text.format(x=made)
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = run(make_nodes(1)[0], [sys.executable, "-c", code, text])
    assert json.loads(done.stdout) == [text]
    assert not made.exists()


def test_values_of_variables_arrive_as_they_are(make_nodes: Nodes, log: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    evil = [text.format(x=made) for text in EVIL]
    node = replace(make_nodes(1)[0], interpreter=sys.executable)
    request = {"verb": "probe", "cluster": "x", "env": {f"V{index}": text for index, text in enumerate(evil)}}
    answer = asyncio.run(node_requests.ask(Transport(), node, request, deadline=60))
    assert answer.data is not None, answer
    # An interpreter with a name that a shell would run.
    node = replace(node, interpreter=f"/nowhere/$(touch {made})/python")
    assert "does not exist" in asyncio.run(node_requests.ask(Transport(), node, {"verb": "probe"}, deadline=60)).message
    assert not made.exists()


def test_neither_script_nor_token_is_an_argument(make_nodes: Nodes, log: Path) -> None:
    node = replace(make_nodes(1)[0], interpreter=sys.executable)
    request = {"verb": "probe", "cluster": "x", "token": "0123456789abcdef"}
    assert asyncio.run(node_requests.ask(Transport(), node, request, deadline=60)).data is not None
    assert "0123456789abcdef" not in log.read_text()
    assert len(json.loads(log.read_text())[-1]) < 300


def test_a_command_that_does_not_end_is_ended_at_its_deadline(make_nodes: Nodes, log: Path) -> None:
    result = run(make_nodes(1)[0], ["sleep", "600"], deadline=0.5)
    assert result.kind is CommandOutcome.TIMEOUT
    # Output is bounded.
    result = run(make_nodes(1)[0], [sys.executable, "-c", "print('x' * 3_000_000)"])
    assert (result.rc, len(result.stdout)) == (0, 1 << 20)


def test_without_a_client(make_nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(make_nodes(1)[0], ["true"])
    assert result.kind is CommandOutcome.NO_CLIENT
    assert "install OpenSSH" in (result.help or "")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Host key verification failed.", CommandOutcome.UNKNOWN_HOST_KEY),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            CommandOutcome.HOST_KEY_CHANGED,
        ),
        ("me@h: Permission denied (publickey).", CommandOutcome.KEY_REFUSED),
        ("Received disconnect from 10.0.0.1: Too many authentication failures", CommandOutcome.KEY_REFUSED),
        ("ssh: Could not resolve hostname h: Name or service not known", CommandOutcome.UNRESOLVED),
        ("ssh: connect to host h port 22: Connection refused", CommandOutcome.UNREACHABLE),
        ("ssh: connect to host h port 22: No route to host", CommandOutcome.UNREACHABLE),
        ("ssh: connect to host h port 22: Connection timed out", CommandOutcome.UNREACHABLE),
        ("Connection timed out during banner exchange", CommandOutcome.UNREACHABLE),
        ("kex_exchange_identification: Connection closed by remote host", CommandOutcome.UNREACHABLE),
        ("Timeout, server h not responding.", CommandOutcome.DROPPED),
        ("client_loop: send disconnect: Broken pipe", CommandOutcome.DROPPED),
        ("Connection to h closed by remote host.", CommandOutcome.DROPPED),
        ("something that nobody has foreseen", CommandOutcome.FAILED),
    ],
)
def test_why_ssh_failed(make_nodes: Nodes, said: str, kind: CommandOutcome) -> None:
    assert classify(CommandResult(255, b"", said.encode())) is kind
    assert remedy(kind, make_nodes(1)[0])
    # The command's own exit code is no failure of ssh; the agent's word says that it was reached.
    assert classify(CommandResult(7, b"", said.encode())) is CommandOutcome.DONE
    assert classify(CommandResult(255, b'{"event": "hello"}', b"Connection closed by h")) is CommandOutcome.DROPPED


def test_the_remedy_names_port_and_options(make_nodes: Nodes) -> None:
    text = "cluster: {num_nodes: 1, hosts: me@h, ssh: {port: 2222, options: {ProxyJump: gate}}}"
    (node,) = make_nodes(text=text)
    assert "`ssh-keygen -R '[h]:2222'`" in (remedy(CommandOutcome.HOST_KEY_CHANGED, node) or "")
    assert "`ssh -o ProxyJump=gate -p 2222 me@h`" in (remedy(CommandOutcome.KEY_REFUSED, node) or "")
    without = make_nodes(text="cluster: {num_nodes: 1, hosts: h, ssh: {identity_file: $HOME/.ssh/none}}")[0]
    assert "there is no file `$HOME/.ssh/none`" in (remedy(CommandOutcome.KEY_REFUSED, without) or "")
    assert "`ssh-keygen -R h0`" in (remedy(CommandOutcome.HOST_KEY_CHANGED, make_nodes(1)[0]) or "")


@pytest.mark.security
@pytest.mark.parametrize(("what", "message"), [("link", "not a private folder of yours"), ("file", "cannot be used")])
def test_connections_are_shared_in_a_folder_of_ones_own(
    make_nodes: Nodes, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    # Short: a longer one is replaced by /tmp.
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        (elsewhere := Path(name, "home")).mkdir(mode=0o700)
        place = Path(name, f"rlinf-{os.getuid()}")
        if what == "link":
            place.symlink_to(elsewhere)
        else:
            place.write_text("")
        with pytest.raises(ClusterError, match=message):
            ssh_arguments(make_nodes(1)[0])
        assert not list(elsewhere.iterdir())
