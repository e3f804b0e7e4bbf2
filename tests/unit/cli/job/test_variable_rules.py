"""Environment variables that do not do what they seem to."""

from __future__ import annotations

import pytest

from rlinf_core.config.diagnostics import Severity
from tests.unit.config.cluster_findings import check, env, faults_of


def test_variables_as_a_plain_map_have_places_too() -> None:
    assert faults_of(env("node_ranks: 0, env_vars: {A: 1, RANK: 2, HF_TOKEN: xyz}")) == [
        ("env-var-of-process", 4, "RANK"),
        ("secret-in-file", 4, "HF_TOKEN"),
    ]


@pytest.mark.parametrize("value", ["/opt/lib:$LD_LIBRARY_PATH", "$HOME/x", "~/bin", "a:~/b"])
def test_value_for_a_shell_is_a_warning(value: str) -> None:
    (diagnostic,) = check(env(f"node_ranks: 0, env_vars: [X: '{value}']"))
    assert (diagnostic.code, diagnostic.severity) == ("env-var-not-expanded", Severity.WARNING)


@pytest.mark.parametrize("value", ["a$", "$1", "a~b", "100%", "x=${y}"])
def test_other_signs_are_left_alone(value: str) -> None:
    assert faults_of(env(f"node_ranks: 0, env_vars: [X: '{value}']")) == []


def test_forwarded_variables() -> None:
    text = "cluster:\n  num_nodes: 1\n  forward_env: [HOME, RANK, HF_TOKEN, HOME]\n"
    assert faults_of(text) == [("env-var-of-process", 3, "RANK"), ("duplicate-env-var", 3, "HOME")]


@pytest.mark.parametrize(
    ("path", "interpreter"),
    [
        ("/opt/venv/train", "/opt/venv/train/bin/python"),
        ("/opt/venvs/py311/", "/opt/venvs/py311/bin/python"),
        ("/home/me/.venv/bin", "/home/me/.venv/bin/python"),
        ("/opt/python-3.11/envs/sim", "/opt/python-3.11/envs/sim/bin/python"),
    ],
)
def test_a_folder_as_an_interpreter_is_a_warning(path: str, interpreter: str) -> None:
    texts = (
        env(f"node_ranks: 0, python_interpreter_path: {path}"),
        (f"cluster:\n  num_nodes: 1\n  python_interpreter_path: {path}\n"),
    )
    for text in texts:
        (finding,) = check(text)
        assert (finding.code, finding.severity, finding.span.text) == ("interpreter-path", Severity.WARNING, path)
        assert finding.help == f"a folder? Its interpreter is `{interpreter}`"


@pytest.mark.parametrize(
    "path", ["/opt/venv/bin/python3.11", "/usr/bin/python3.13t", "/opt/pypy3", "/opt/bin/with-modules", "/opt/run.sh"]
)
def test_programs_as_interpreters_are_left_alone(path: str) -> None:
    assert faults_of(env(f"node_ranks: 0, python_interpreter_path: {path}")) == []
