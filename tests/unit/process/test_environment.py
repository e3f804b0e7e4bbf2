"""What a process is told by its environment: variables, paths of imports, requirements, limits, tracing."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core import ConfigError, env_vars
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.env_vars import REGISTER, EnvVar
from rlinf_core.errors import EnvironmentVariableError, RLinfError
from rlinf_core.process import activity, import_path, proc, requirements
from rlinf_core.process.activity import SpanRecorder
from rlinf_core.process.requirements import absence, install_command, missing_modules, require_version
from rlinf_core.waiting import OperationKind, contact_seconds, stretched
from rlinf_core.worker.timer import timer


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
        *((env_vars.SHM_LIMIT, raw) for raw in ("0", "-1", "MB", "1 XB", "1e9", "0.2", "２MB")),
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


TAKEN = ("random", "types", "json", "logging", "rlinf_core", "rlinf_cli")
MANAGED = "import sys; sys.path.pop(0); from rlinf_core.process import import_path; import_path.manage({folder!r})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with modules and packages of names that are taken."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s {name}')")
    for name in ("recipes", "configs", "tests", "docs", "benchmarks", "yaml_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'the user\\'s {name}'")
        (tmp_path / name / "mine.py").write_text("WHOSE = 'mine'")
    # Installed, too.
    (tmp_path / "pydantic.py").write_text("WHOSE = __file__ = 'mine'")
    return tmp_path


def run(code: str, folder: Path) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = MANAGED.format(folder=str(folder)) + code
    root = Path(import_path.OWN_ROOT)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**env, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("name", ["random", "types", "json", "logging"])
def test_the_standard_library_is_not_hidden(folder: Path, name: str) -> None:
    [file] = run(f"import {name}; print({name}.__file__)", folder)
    assert Path(file).parent != folder


@pytest.mark.parametrize("name", ["rlinf_cli.main", "recipes.embodied", "configs"])
def test_our_packages_are_not_hidden(folder: Path, name: str) -> None:
    [file] = run(f"from importlib.util import find_spec; print(find_spec({name!r}).origin)", folder)
    assert file.startswith(import_path.OWN_ROOT + os.sep)


def test_modules_of_the_working_folder_are_found(folder: Path) -> None:
    code = "import yaml_of_mine.mine as a, recipes.mine as b, recipes.embodied\n"
    assert run(f"{code}print(a.WHOSE, b.WHOSE)", folder) == ["mine mine"]


def test_installed_packages_are_hidden_by_a_named_folder_alone(folder: Path) -> None:
    code = "import pydantic; print(pydantic.__file__ == 'mine')"
    assert run(code, folder) == ["False"]
    named = f"sys.path.insert(1, {str(folder)!r}); import_path.manage({str(folder)!r});{code}"
    assert run(named, folder) == ["True"]


def test_a_folder_that_is_added_late_is_searched_too(folder: Path) -> None:
    code = f"import recipes; import_path.add_user_folders([{str(folder)!r}]); import recipes.mine as a; print(a.WHOSE)"
    assert run(f"import_path.manage(None); sys.path.remove({str(folder)!r})\n{code}", folder) == ["mine"]


def test_interpreter_and_packages_are_no_user_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [os.path.dirname(os.__file__), os.path.dirname(pytest.__file__), "", "/srv/mine"])
    assert import_path.user_folders()[-2:] == (os.path.realpath(os.getcwd()), "/srv/mine")
    assert os.path.dirname(os.__file__) not in import_path.user_folders()


@pytest.mark.parametrize(
    ("inside", "files"),
    [
        (".", ["run.json"]),
        ("checkpoints/global_step_1/actor", ["run.json"]),
        ("actor", [".metadata"]),
        (".", ["config.json", "tokenizer.json"]),
        (".", ["config.json", "model.safetensors"]),
        ("data", ["meta/info.json"]),
    ],
)
def test_modules_in_received_folders_are_not_found(tmp_path: Path, inside: str, files: list[str]) -> None:
    place = tmp_path / inside
    place.mkdir(parents=True, exist_ok=True)
    (place / "numpy.py").write_text("raise SystemExit('this ran')")
    assert not import_path.holds_data(str(place))
    for name in files:
        file = (place if files == [".metadata"] else tmp_path) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    assert import_path.holds_data(str(place))
    code = f"import_path.manage({str(place)!r}); import numpy; print(numpy.__name__)"
    assert run(code, place) == ["numpy"]


def test_processes_of_libraries_import_nothing_received(folder: Path) -> None:
    code = (
        "from multiprocessing import get_context\n"
        "if __name__ == '__main__':\n"
        "    pool = get_context('forkserver').Pool(1)\n"
        "    print(pool.apply(abs, (-3,)))\n"
    )
    (folder / "run.json").touch()
    (folder / "weakref.py").write_text("raise RuntimeError('the received weakref')")
    assert run(code, folder) == ["3"]


def test_module_in_another_process_has_the_same_imports(folder: Path) -> None:
    (folder / "shown.py").write_text("import random, sys, yaml_of_mine; print(random.__file__, sys.argv[1:], __name__)")
    code = (
        "import subprocess; command = import_path.module_command('shown'); "
        "print(subprocess.run([*command, 'x'], capture_output=True, text=True, check=True).stdout, end='')"
    )
    [shown] = run(code, folder)
    assert shown.endswith("random.py ['x'] __main__")
    assert str(folder) not in shown


PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_command_names_this_interpreter_and_the_packages() -> None:
    assert install_command("lerobot", "PIL") == f"{sys.executable} -m pip install lerobot 'pillow>=10'"


def test_of_another_interpreter_quoted_for_a_shell() -> None:
    command = install_command("ray", "panda_gym", python="/opt/my env/bin/python")
    assert command == "'/opt/my env/bin/python' -m pip install 'ray>=2.54,<2.61' 'panda-gym>=3.0.7,<4'"


def test_what_is_missing() -> None:
    assert missing_modules(["json", "no_such_module_at_all"]) == ["no_such_module_at_all"]


@pytest.mark.parametrize(
    ("module", "installed", "fits"),
    [
        ("transformers", "4.57.1", False),
        ("transformers", "5.2.9", False),
        ("transformers", "5.3", True),
        ("transformers", "5.23.0.dev0", True),
        ("transformers", "6.0.0", False),
        ("transformers", "10.1", False),
        ("math_verify", "0.10.0", True),
        ("math_verify", "1", False),
        ("ray", "2.60.0", True),
        ("ray", "2.61.0", False),
        ("numpy", "1.25.2", False),
        ("torch", "2.13.0+cpu", True),
        ("google.protobuf", "8.0", False),
        ("peft", "unknown", True),
    ],
)
def test_an_installed_version_out_of_range_is_missing(
    module: str, installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What extras ask for holds for what is there, too."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    assert missing_modules([module]) == ([] if fits else [module])
    if fits:
        require_version(module)
        return
    said = requirements._REQUIREMENTS[module]
    assert f"this Python has {installed}, out of the range >=" in absence(module)
    with pytest.raises(ConfigError) as caught:
        require_version(module)
    assert installed in caught.value.message
    assert caught.value.message.rpartition(" ")[2] in said
    assert caught.value.help == f"run `{install_command(module)}`"


def test_the_versions_here_are_in_range() -> None:
    """Those that are installed; the rest is not asked for its version."""
    assert [name for name in requirements._REQUIREMENTS if "out of the range" in absence(name)] == []


@pytest.mark.parametrize("requirement", sorted(requirements._REQUIREMENTS.values()))
def test_the_extras_ask_for_the_same(requirement: str) -> None:
    assert requirement in {item for extra in PROJECT["optional-dependencies"].values() for item in extra}


def test_what_any_extra_asks_for_is_checked() -> None:
    extras = PROJECT["optional-dependencies"].items()
    asked = {item for name, items in extras if name not in ("dev", "docs") for item in items}
    assert {item for item in asked if not item.startswith("rlinf-cli")} <= {*requirements._REQUIREMENTS.values()}


def test_no_message_installs_by_the_name_of_another_project() -> None:
    """On PyPI `rlinf` is one of other people."""
    root = Path(__file__).parents[3]
    assert PROJECT["name"] == "rlinf-cli"
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    files += [path for folder in ("rlinf_core", "rlinf_cli", "recipes") for path in (root / folder).rglob("*.py")]
    assert [str(path) for path in files if "rlinf[" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 30.0), (2.0, 30.0), (6.0, 90.0), (60.0, 300.0)])
def test_a_limit_grows_with_the_load_of_each_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, seconds: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("RLINF_CONNECT_TIMEOUT", raising=False)
    assert stretched(30.0) == seconds
    assert contact_seconds() == Settings.from_environment().connect_timeout == seconds
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "12")
    assert contact_seconds() == Settings.from_environment().connect_timeout == 12.0


def test_a_system_that_tells_no_load_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert stretched(30.0) == 30.0


@pytest.fixture
def traced() -> Iterator[None]:
    activity.start()
    yield
    activity.stop()


def test_nothing_is_recorded_unless_traced() -> None:
    activity.stop()
    with timer("work"):
        pass
    assert activity.take() == ([], 0)


@pytest.mark.usefixtures("traced")
def test_a_timer_is_a_span() -> None:
    before = time.time()
    with timer("outer"), timer("inner"):
        pass
    taken = activity.take()
    inner, outer = taken.spans
    assert [(span.kind, span.name) for span in taken.spans] == [("timer", "inner"), ("timer", "outer")]
    assert inner.task_key == outer.task_key == threading.get_ident()
    # One lies within the other, whatever comes between the two ends; the rest is rounding of seconds since 1970.
    assert outer.began <= inner.began + 1e-6
    assert inner.began + inner.seconds <= outer.began + outer.seconds + 1e-6
    # The clock of the host may be set meanwhile, hence the second.
    assert before - 1 <= outer.began <= time.time() + 1
    assert activity.take() == ([], 0)


@pytest.mark.usefixtures("traced")
def test_waits_and_transfers_are_spans() -> None:
    board = WaitTable()
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 30.0, board)
    sender: Work[int] = Work(OperationKind.SEND, "actor:0", 30.0, board, detached=True)
    threading.Timer(0.01, lambda: (work.finish(1), sender.finish(2))).start()
    serial = board.operations.begin(OperationKind.METHOD, "generate")
    assert (work.wait(), sender.wait()) == (1, 2)
    board.operations.end(serial)
    results = {(span.kind, span.name) for span in activity.take().spans}
    assert {
        ("wait", "recv from actor:0"),
        ("transfer", "recv from actor:0"),
        ("transfer", "send to actor:0"),
        ("method", "generate"),
    } <= results


@pytest.mark.usefixtures("traced")
def test_a_wait_for_what_goes_on_in_the_background_is_a_span() -> None:
    work: Work[int] = Work(OperationKind.SEND, "actor:0", 30.0, WaitTable(), detached=True)
    threading.Timer(0.05, lambda: work.finish(1)).start()
    work.wait()
    waits = [span for span in activity.take().spans if span.kind == activity.WAIT]
    assert [span.name for span in waits] == ["send to actor:0"]
    assert waits[0].task_key == threading.get_ident()


@pytest.mark.usefixtures("traced")
def test_tasks_of_one_thread_are_told_apart() -> None:
    async def timed(name: str) -> None:
        with timer(name):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(timed("a"), timed("b"))

    asyncio.run(both())
    task_keys = {span.name: span.task_key for span in activity.take().spans}
    assert task_keys["a"] != task_keys["b"]


def test_memory_is_bounded() -> None:
    recorder = SpanRecorder(limit=3)
    for number in range(5):
        recorder.add(activity.TIMER, str(number), 0.0, 1.0)
    taken = recorder.take()
    assert [span.name for span in taken.spans] == ["0", "1", "2"]
    assert taken.dropped == 2
    recorder.add(activity.TIMER, "later", 0.0, 1.0)
    assert recorder.take().dropped == 0
