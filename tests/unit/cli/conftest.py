"""Running `rlinf` in this process, and as the installed command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.typed import Cli, Ended, text_file

RLINF = Path(sys.executable).with_name("rlinf")
# Typer and CI systems force colours through these.
_NOISE = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS", "LINES", "TERMINAL_WIDTH")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command line in this process: `cli("validate", "a.yaml")`."""
    from rlinf_cli import console
    from rlinf_cli.main import main

    for name in _NOISE:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        console.verbosity.reset()
        out, err = capsys.readouterr()
        return Ended(int(code), out, err)

    return Cli(run)


@pytest.fixture
def rlinf() -> Cli:
    """Runs the installed command: `rlinf("validate", "-", stdin=b"...")`."""

    def run(
        *arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> Ended:
        environment = {name: value for name, value in os.environ.items() if name not in _NOISE} | dict(environ or {})
        done = subprocess.run(
            [RLINF, *map(str, arguments)],
            input=stdin,
            cwd=cwd,
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    return Cli(run)


@pytest.fixture
def contract() -> Callable[[str, str], Any]:
    """Checks an output against the contract of its name, and returns it as data."""
    import jsonschema

    def check(name: str, text: str) -> Any:
        data = json.loads(text)
        schema = json.loads((Path(__file__).parent / "contracts" / f"{name}.json").read_text(encoding="utf-8"))
        jsonschema.validate(data, schema)
        return data

    return check


MIXED = """\
cluster:
  num_nodes: 4
  node_groups:
    - label: a800
      node_ranks: 0-1
      hosts: trainer[00-01]
      accelerators: {model: A800, per_node: 4}
      env_configs:
        - node_ranks: 0
          python_interpreter_path: /opt/train/bin/python
          env_vars:
            - NCCL_SOCKET_IFNAME: eth0
            - WANDB_API_KEY: hunter2
            - PYTHONPATH: /opt/lib
    - label: sim
      node_ranks: 2
    - label: franka
      node_ranks: 3
      hardware:
        type: Franka
        configs:
          - {node_rank: 3, robot_ip: 10.0.0.1}
          - {node_rank: 3, robot_ip: 10.0.0.2}
  component_placement:
    actor: {node_group: a800, placement: 0-3}
    rollout: {node_group: a800, placement: "0-1:0,2-7:1-3"}
    sim: {node_group: sim, placement: "0-1:0-3"}
    env: {node_group: franka, placement: 0-1}
    agent: {node_group: node, placement: "0:0-99"}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Training, simulation and robots: shared, idle and unknown units, and a secret. The unknown is group `sim`."""
    return text_file(tmp_path / "mixed.yaml", MIXED)


PACKAGES = Path(__file__).parent / "packages"


@pytest.fixture
def fake_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The recipe `fake`, for `cli` and `rlinf` alike, in an empty working folder, which is returned."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    # Whatever cluster runs on the machine of the test.
    monkeypatch.setenv("RLINF_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)
    return tmp_path
