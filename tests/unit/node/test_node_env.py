"""The merging of variables on a node, and the program that becomes an interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.node import node_env


@pytest.mark.parametrize(
    "value", ["$HOME costs 5$", "${HOME}", "${NOWHERE}x", "`id`", "a'b\"c\\", "two\nlines", "", "é"]
)
def test_a_value_arrives_as_it_is_written(tmp_path: Path, value: str) -> None:
    request = {"interpreter": sys.executable, "env": {"A": value, "HOME": "/elsewhere"}, "prepended": []}
    command = node_env.command(sys.executable, node_env.write(str(tmp_path), request))
    asked = "import json, os, sys; print(json.dumps([os.environ['A'], os.environ['HOME'], sys.argv[1:]]))"
    said = subprocess.run([*command, "-c", asked, "$HOME"], capture_output=True, check=True, timeout=60).stdout
    assert json.loads(said) == [value, "/elsewhere", ["$HOME"]]


def test_lists_of_directories_go_before_the_own_ones_once() -> None:
    def path(own: str | None, inputs: str) -> str:
        return node_env.merged({} if own is None else {"PATH": own}, {"PATH": inputs}, ["PATH"])["PATH"]

    assert path("/usr/bin", "/opt/bin") == "/opt/bin:/usr/bin"
    assert path("/opt/bin:/usr/bin", "/opt/bin") == "/opt/bin:/usr/bin"
    assert path("/opt/bin2", "/opt/bin") == "/opt/bin:/opt/bin2"
    assert path("/usr/bin", "/usr/bin") == "/usr/bin"
    # An empty entry of such a list would mean the working directory.
    assert [path(None, "/opt/bin"), path("", "/opt/bin"), path("/usr/bin", "")] == ["/opt/bin", "/opt/bin", "/usr/bin"]


def test_other_variables_replace_the_own_ones() -> None:
    assert node_env.merged({"A": "1", "B": "2"}, {"B": "3"}, ["PATH"]) == {"A": "1", "B": "3"}


def test_only_the_user_reads_what_may_be_secret(tmp_path: Path) -> None:
    path = node_env.write(str(tmp_path), {"interpreter": "/x", "env": {"TOKEN": "hunter2"}, "prepended": []})
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert "hunter2" not in path
    assert [path.name for path in tmp_path.iterdir()] == [Path(path).name]
