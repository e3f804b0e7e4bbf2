"""Configurations that are no regular files, or no configurations: neither is waited for nor shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.config.render import render_text
from rlinf_core.job.load import Job, load_job

pytestmark = pytest.mark.security
CLUSTER = "cluster:\n  num_nodes: 1\n"


def output(job: Job) -> str:
    return "\n".join(map(render_text, job.diagnostics))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("text", [None, "extends: base.yaml\n", "extends: [./base.yaml]\n"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, make: object, text: str | None) -> None:
    assert callable(make)
    make(tmp_path / "base.yaml")
    file = tmp_path / ("base.yaml" if text is None else "job.yaml")
    if text is not None:
        file.write_text(text)
    (finding,) = load_job(str(file)).diagnostics
    assert finding.code == ("unreadable-file" if text is None else "base-unreadable")
    assert "not a regular file" in finding.message


def test_a_base_is_not_read_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("extends: /dev/stdin\n")
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "validate", str(tmp_path / "job.yaml")],
        capture_output=True, text=True, check=False, timeout=60, input=CLUSTER,
    )  # fmt: skip
    assert done.returncode == 2
    assert "base-unreadable" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["/dev/stdin", "-", "/dev/fd/0"])
def test_standard_input_stays(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "validate", name],
        input=CLUSTER, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "num_nodes" not in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shadow", "".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5))),
        ("shadow.yaml", "".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5))),
        ("group", "".join(f"group{n}:x:{n}:\n" for n in range(5))),
        ("accounts", "".join(f"user{n}: hash-{n}\n" for n in range(5))),
        ("key", "-----BEGIN KEY-----\n" + "hash-0\n" * 5),
        ("htpasswd", "".join(f"user{n}:$apr1$hash-{n}\n" for n in range(5))),
    ],
)
def test_a_base_that_is_no_configuration_is_not_shown(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "job.yaml").write_text(f"extends: {name}\nrecipe: embodied\n{CLUSTER}")
    shown = output(load_job(str(tmp_path / "job.yaml")))
    assert "hash-" not in shown
    assert name in shown


def test_a_table_of_passwords_is_not_shown_as_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("".join(f"user{n}:$6$hash-{n}:19000:0:99999:7:::\n" for n in range(5)))
    shown = output(load_job(str(tmp_path / "shadow")))
    assert "hash-" not in shown
    assert "`user0:$6`" in shown


def test_a_base_of_another_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "base").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text("extends: base\n")
    assert not list(load_job(str(tmp_path / "job.yaml")).diagnostics)
