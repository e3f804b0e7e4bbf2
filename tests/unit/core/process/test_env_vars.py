from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from rlinf_core import env_vars
from rlinf_core.env_vars import REGISTER, EnvVar
from rlinf_core.errors import EnvironmentVariableError, RLinfError
from rlinf_core.process import proc


@pytest.mark.parametrize("variable", REGISTER.values(), ids=REGISTER)
def test_unset_and_empty_mean_the_default(variable: EnvVar[object]) -> None:
    assert variable.get({}) == variable.default
    assert variable.get({variable.name: "  "}) == variable.default


@pytest.mark.parametrize("variable", REGISTER.values(), ids=REGISTER)
def test_each_says_what_it_is(variable: EnvVar[object]) -> None:
    assert variable.name.startswith("RLINF_")
    assert variable.doc.endswith(".")
    assert variable.expected


def test_every_declared_variable_is_in_the_register() -> None:
    declared = {value.name for value in vars(env_vars).values() if isinstance(value, EnvVar)}
    assert declared == set(REGISTER)


def test_defaults_of_the_specification() -> None:
    assert env_vars.TIMEOUT.default == 1800
    assert env_vars.CONNECT_TIMEOUT.default == 30


def test_this_process_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_TIMEOUT", " 2.5 ")
    assert env_vars.TIMEOUT.get() == 2.5


@pytest.mark.parametrize(
    ("variable", "raw"),
    [
        *((env_vars.TIMEOUT, raw) for raw in ("soon", "0", "-1", "nan", "inf", "10s")),
        *((env_vars.NODE_RANK, raw) for raw in ("-1", "one", "1.0", "²")),
        *((env_vars.SHM_LIMIT, raw) for raw in ("0", "-1", "MB", "1 XB", "1e9", "0.2")),
        (env_vars.LOG_LEVEL, "loud"),
    ],
    ids=lambda value: value.name if isinstance(value, EnvVar) else value,
)
def test_a_bad_value_names_variable_value_and_what_was_expected(variable: EnvVar[object], raw: str) -> None:
    with pytest.raises(RLinfError) as caught:
        variable.get({variable.name: raw})
    assert isinstance(caught.value, EnvironmentVariableError)
    assert (caught.value.name, caught.value.value) == (variable.name, raw)
    assert f"`{variable.name}` is `{raw}`, expected {variable.expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64MB", 64_000_000), ("1.5 GiB", 3 << 29), ("2gi", 2 << 30), ("10k", 10_000), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert env_vars.SHM_LIMIT.get({"RLINF_SHM_LIMIT": text}) == size


def test_values() -> None:
    assert env_vars.NODE_RANK.get({"RLINF_NODE_RANK": "12"}) == 12
    assert env_vars.NET_IF.get({"RLINF_NET_IF": "eth0"}) == "eth0"
    assert env_vars.LOG_LEVEL.get({"RLINF_LOG_LEVEL": "debug"}) == "DEBUG"
    assert not math.isinf(env_vars.TIMEOUT.get({"RLINF_TIMEOUT": "1e6"}))


def test_all_wrong_register_entries_are_reported() -> None:
    env_vars.check({})
    env_vars.check({"RLINF_TIMEOUT": "3", "RLINF_SHM_LIMIT": "64MB", "OTHER": "x"})
    with pytest.raises(EnvironmentVariableError, match="`RLINF_SHM_LIMIT` is `lots`") as caught:
        env_vars.check({"RLINF_SHM_LIMIT": "lots"})
    assert caught.value.why is None
    with pytest.raises(EnvironmentVariableError, match="`RLINF_TIMEOUT` is `0`") as caught:
        env_vars.check({"RLINF_TIMEOUT": "0", "RLINF_CALL_TIMEOUT": "inf"})
    assert "`RLINF_CALL_TIMEOUT` is `inf`" in str(caught.value.why)


def test_a_mistyped_one_is_told_with_the_one_that_was_meant() -> None:
    output = env_vars.unknown({"RLINF_TIMOUT": "3", "RLINF_WEATHER": "fine", "RLINF_TIMEOUT": "3", "PATH": "/bin"})
    assert output == [
        "`RLINF_TIMOUT` in the environment is not a variable of rlinf; did you mean `RLINF_TIMEOUT`?",
        "`RLINF_WEATHER` in the environment is not a variable of rlinf",
    ]


def test_a_variable_of_an_earlier_release_says_what_holds_now() -> None:
    assert env_vars.unknown({"RLINF_DEVICE_TRANSPORT": "nccl"}) == [
        "`RLINF_DEVICE_TRANSPORT` in the environment is not read any more: tensors on GPUs always go through host "
        "memory"
    ]


def test_what_processes_of_rlinf_are_told_by_is_no_mistake() -> None:
    assert {proc.MARK} == env_vars.MARKS
    assert env_vars.unknown(dict.fromkeys([*REGISTER, *env_vars.MARKS], "x")) == []
    # Shipped configs read interpreters of simulators from such names.
    assert env_vars.unknown({"RLINF_METAWORLD_PYTHON": "/opt/venv/metaworld/bin/python"}) == []


def test_the_package_reads_no_other_variable() -> None:
    package = Path(env_vars.__file__).parent
    result: set[str] = set()
    for file in package.rglob("*.py"):
        result |= set(re.findall(r"""(?:environ(?:\.get)?|getenv)[\[(]\s*["'](RLINF_\w+)""", file.read_text()))
    assert result <= set(REGISTER)
